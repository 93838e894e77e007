"""Checkpoints of a megatron-core model and its optimizer, which can be loaded in another TP x PP x DP layout.

The format is megatron-core's own (`dist_checkpointing`, the distributed optimizer as "fully_reshardable"): a folder
with files of each rank and, written last, ``metadata.json``. Megatron's own tools read it. What is not tensors
(Lightning's loops, callbacks, schedulers) is in ``common.pt``, read with ``weights_only=True``: it must be plain data.

A checkpoint is written beside its place and moved there when it is whole, so that one at its place is whole. All
functions but `rest` are collectives of all ranks of `torch.distributed`'s default group. The format's own exchanges and
its index are pickles (docs/decisions/0011). For megatron-core 0.16.
"""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies import torch as torch_format
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed import checkpoint as dcp
from typing_extensions import override

from unicron_lightning.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CONTENT: Final = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
"""How optimizer state is divided; stored with it."""


class Writer(SaveShardedStrategy):
    """Megatron-core's format through torch's writer.

    Its own writer forks processes and starts a manager that imports the user's script anew. Both are for writing
    in the background, and neither goes well with a process that has threads, sockets and a GPU.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    @override
    def can_handle_sharded_objects(self) -> bool:
        return True

    @override
    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        grouped, _, _ = torch_format._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, keep_only_main_replica=True
        )
        dcp.save(
            torch_format.mcore_to_pyt_state_dict(grouped, is_loading=False),
            storage_writer=dcp.FileSystemWriter(str(checkpoint_dir)),
            planner=torch_format.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def save(path: str | Path, chunks: Sequence[Any], optimizer: Any, rest: dict[str, Any]) -> None:
    """Writes a checkpoint.

    Args:
        path: of its folder; what is there is replaced. On storage that all ranks see.
        chunks: megatron-core's `DistributedDataParallel` modules.
        optimizer: megatron-core's.
        rest: plain data that belongs to it; rank 0's is written.
    """
    target = Path(path)
    unfinished = target.with_name(f"{target.name}.unfinished")
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    dist.barrier()
    content = {**_sharded(chunks, optimizer, is_loading=False), "rest": rest}
    dist_checkpointing.save(
        content,
        str(unfinished),
        sharded_strategy=Writer(),
        preprocess_common_before_consistancy_check=lambda common: {k: v for k, v in common.items() if k != "rest"},
        content_metadata=CONTENT,
    )
    if dist.get_rank() == 0:
        if target.is_dir():
            shutil.rmtree(target)
        unfinished.rename(target)
    dist.barrier()


def load(path: str | Path, chunks: Sequence[Any], optimizer: Any) -> dict[str, Any]:
    """Takes up model and optimizer from a checkpoint, whatever layout it was written in.

    Returns:
        What `save` was given as ``rest``.

    Raises:
        ConfigError: there is no checkpoint at ``path``.
    """
    _check(path)
    for part in _parts(optimizer):
        _prepare(part)
    loaded = dist_checkpointing.load(_sharded(chunks, optimizer, is_loading=True), str(path))
    for index, chunk in enumerate(chunks):
        chunk.module.load_state_dict(loaded[_key(index, chunks)])
    with _steps_apart(optimizer):
        optimizer.load_state_dict(loaded["optimizer"])
    for part in _parts(optimizer):
        _own_steps(part)
    rest: dict[str, Any] = loaded["rest"]
    return rest


def rest(path: str | Path) -> dict[str, Any]:
    """The part of a checkpoint that is not model or optimizer. Not a collective.

    Raises:
        ConfigError: there is no checkpoint at ``path``.
    """
    _check(path)
    found: dict[str, Any] = dist_checkpointing.load_common_state_dict(str(path))["rest"]
    return found


def _check(path: str | Path) -> None:
    if not dist_checkpointing.check_is_distributed_checkpoint(str(path)):
        raise ConfigError(f"{str(path)!r} is no checkpoint of megatron-core: expected a folder with metadata.json")


def _key(index: int, chunks: Sequence[Any]) -> str:
    return "model" if len(chunks) == 1 else f"model{index}"


def _sharded(chunks: Sequence[Any], optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    """What is where: the tensors of this rank with their places in the whole."""
    models = {_key(i, chunks): chunk.module.sharded_state_dict(metadata=CONTENT) for i, chunk in enumerate(chunks)}
    state = optimizer.sharded_state_dict(
        models if len(chunks) > 1 else models["model"], is_loading=is_loading, metadata=CONTENT
    )
    return {**models, "optimizer": state}


def _parts(optimizer: Any) -> list[Any]:
    parts: list[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
    return parts


def _prepare(part: Any) -> None:
    """Gives a fresh Adam its state: megatron-core can load into it only then, and would step it to get it."""
    if part.optimizer is None:
        return
    part.init_state_fn(part.optimizer, part.config)
    if isinstance(part.optimizer, torch.optim.Adam):
        for state in part.optimizer.state.values():
            state.setdefault("step", torch.zeros(()))


@contextmanager
def _steps_apart(optimizer: Any) -> Iterator[None]:
    """Inside, a distributed optimizer does not look for torch Adam's count of steps among the tensors of a parameter.

    It is with the parameter groups in the checkpoint, and was set from there; megatron-core 0.16 looks all the same.
    """
    parts = [part for part in _parts(optimizer) if isinstance(part, DistributedOptimizer)]
    for part in parts:
        original = part._set_main_param_and_optimizer_states

        def complete(parameter: Any, tensors: dict[str, Any], part: Any = part, original: Any = original) -> None:
            original(parameter, {**part._get_main_param_and_optimizer_states(parameter), **tensors})

        part._set_main_param_and_optimizer_states = complete
    try:
        yield
    finally:
        for part in parts:
            del part._set_main_param_and_optimizer_states


def _own_steps(part: Any) -> None:
    """Gives each parameter's count a tensor of its own: loading gives all the same one, which each would advance.

    The count that came with the parameter groups goes: torch's Adam would leave it as it is, and it would be taken for
    the present one later.
    """
    if isinstance(part.optimizer, torch.optim.Adam):
        for state in part.optimizer.state.values():
            state["step"] = torch.as_tensor(state["step"]).clone()
        for group in part.optimizer.param_groups:
            group.pop("step", None)
