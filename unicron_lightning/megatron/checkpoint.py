"""Checkpoints of a megatron-core model and its optimizer, loadable in another TP x PP x DP layout.

The format is megatron-core's own (`dist_checkpointing`, the distributed optimizer as "fully_reshardable"): a folder
with files of each rank and, written last, ``metadata.json``. Megatron's own tools read it. Everything but tensors
(Lightning's loops, callbacks, schedulers) is in ``common.pt``, read with ``weights_only=True``: it must be plain data.

A checkpoint is written beside its final path and renamed when complete, so a checkpoint at its path is always complete.
All functions but `rest` are collectives of all ranks of `torch.distributed`'s default group. The format's own exchanges
and its index are pickles (docs/decisions/0011); nothing
in a file is run (`worker.checkpoint_folders`). For megatron-core 0.16, whose module holds torch's reader and planner.
"""

from __future__ import annotations

import re
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

from unicron_lightning.checkpoints.storage import DATA_SUFFIX
from unicron_lightning.errors import ConfigError
from unicron_lightning.megatron.sharded import initialize_state, parts_of
from unicron_lightning.regular_files import open_regular
from unicron_lightning.worker.checkpoint_files import INDEX, folder_digests, names
from unicron_lightning.worker.checkpoint_folders import FolderReader, HashingFiles, PlainObjects, load_index

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_SHARDING: Final = "fully_reshardable"
"""Division of the distributed optimizer's state."""
_MAIN_PARAMETER: Final = re.compile(r"(.*\.)?state\.param\.")
"""Names of the main parameters, which only a distributed optimizer stores with its state."""


def content() -> dict[str, Any]:
    """Return the division of optimizer state, which is stored with it; Megatron adds groups of the present epoch."""
    return {"distrib_optim_sharding_type": _SHARDING, "chained_optim_avoid_prefix": True}


class Writer(SaveShardedStrategy):
    """Writes megatron-core's format with torch's writer.

    Megatron-core's own writer forks processes and starts a manager that imports the user's script again. Both serve
    writing in the background and are unsafe in a process with threads, sockets and a GPU.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)
        self._files = HashingFiles()

    @property
    def digests(self) -> dict[str, str]:
        """Digests of the files written by this process, by name."""
        return self._files.digests

    @override
    def can_handle_sharded_objects(self) -> bool:
        return True

    @override
    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        grouped, _, _ = torch_format._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, keep_only_main_replica=True
        )
        writer = dcp.FileSystemWriter(str(checkpoint_dir))
        writer.fs = self._files
        dcp.save(
            torch_format.mcore_to_pyt_state_dict(grouped, is_loading=False),
            storage_writer=writer,
            planner=torch_format.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def save(path: str | Path, chunks: Sequence[Any], optimizer: Any, rest: dict[str, Any]) -> dict[str, str]:
    """Write a checkpoint.

    Args:
        path: of its folder, which is replaced if it exists; on storage that all ranks see.
        chunks: megatron-core's `DistributedDataParallel` modules.
        optimizer: megatron-core's.
        rest: further plain data; rank 0's is written.

    Returns:
        Digests of the files written by this rank, by name (`worker.checkpoint_files`).
    """
    target = Path(path)
    unfinished = target.with_name(f"{target.name}.unfinished")
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    dist.barrier()
    state, writer = {**sharded(chunks, optimizer, is_loading=False), "rest": rest}, Writer()
    dist_checkpointing.save(
        state,
        str(unfinished),
        sharded_strategy=writer,
        preprocess_common_before_consistancy_check=lambda common: {k: v for k, v in common.items() if k != "rest"},
        content_metadata=content(),
    )
    digests = writer.digests
    if dist.get_rank() == 0:
        # The library has written these small files itself.
        others = [name for name in names(unfinished) if name not in digests and not name.endswith(DATA_SUFFIX)]
        digests |= folder_digests(unfinished, others)
        if target.is_dir():
            shutil.rmtree(target)
        unfinished.rename(target)
    dist.barrier()
    return digests


def load(path: str | Path, chunks: Sequence[Any], optimizer: Any) -> dict[str, Any]:
    """Load model and optimizer from a checkpoint of any layout.

    Returns:
        The argument ``rest`` of `save`.

    Raises:
        ConfigError: no checkpoint exists at ``path``, its index names something that no index needs, or it was written
            with a distributed optimizer and is to be loaded without, or the reverse.
    """
    _check(path)
    # In each rank: the library would report it as another error.
    with open(Path(path) / INDEX, "rb", opener=open_regular) as file:
        _check_kind(str(path), load_index(file, file.name).state_dict_metadata, optimizer)
    for part in parts_of(optimizer):
        initialize_state(part)
    with _restricted():
        loaded = dist_checkpointing.load(sharded(chunks, optimizer, is_loading=True), str(path))
    for index, chunk in enumerate(chunks):
        chunk.module.load_state_dict(loaded[_key(index, chunks)])
    with _steps_apart(optimizer):
        optimizer.load_state_dict(loaded["optimizer"])
    for part in parts_of(optimizer):
        _own_steps(part)
    rest: dict[str, Any] = loaded["rest"]
    return rest


def rest(path: str | Path) -> dict[str, Any]:
    """The part of a checkpoint that is not model or optimizer. Not a collective.

    Raises:
        ConfigError: no checkpoint exists at ``path``.
    """
    _check(path)
    found: dict[str, Any] = dist_checkpointing.load_common_state_dict(str(path))["rest"]
    return found


def _check(path: str | Path) -> None:
    if not dist_checkpointing.check_is_distributed_checkpoint(str(path)):
        raise ConfigError(f"{str(path)!r} is no checkpoint of megatron-core: expected a folder with metadata.json")


def _check_kind(path: str, stored: Iterable[str], optimizer: Any) -> None:
    """Refuse the state of another kind of optimizer, whose tensors have other names."""
    was = any(_MAIN_PARAMETER.match(name) for name in stored)
    now = any(isinstance(part, DistributedOptimizer) for part in parts_of(optimizer))
    if was != now:
        raise ConfigError(
            f"{path!r} was written with use_distributed_optimizer={was}, and this run has "
            f"use_distributed_optimizer={now}: expected the same value in OptimizerConfig and in Megatron's ddp"
        )


def _key(index: int, chunks: Sequence[Any]) -> str:
    return "model" if len(chunks) == 1 else f"model{index}"


def sharded(chunks: Sequence[Any], optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    """Return the tensors of this rank with their places in the whole; with the distributed optimizer a collective."""
    metadata = content()
    models = {_key(i, chunks): chunk.module.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(chunks)}
    with _places_without_padding(optimizer):
        state = optimizer.sharded_state_dict(
            models if len(chunks) > 1 else models["model"], is_loading=is_loading, metadata=metadata
        )
    return {**models, "optimizer": state}


@contextmanager
def _places_without_padding(optimizer: Any) -> Iterator[None]:
    """Give the distributed optimizer's buffers the places of parameters that do not count the padding between buckets.

    Megatron-core 0.16 gathers the buckets without that padding, but takes each parameter from its place with it: of
    each bucket that follows a padded one, other elements are stored. Tied embeddings have a bucket of their own.
    """
    parts = [part for part in parts_of(optimizer) if isinstance(part, DistributedOptimizer)]
    original = [(buffer, buffer.param_index_map) for part in parts for buffer in part.buffers]
    for buffer, places in original:
        padding, filled = [], 0
        for bucket in buffer.buckets:
            padding.append(bucket.offset - filled)
            filled += bucket.numel_unpadded
        buffer.param_index_map = {
            parameter: (start - padding[number], end - padding[number], number)
            for parameter, (start, end, number) in places.items()
        }
    try:
        yield
    finally:
        for buffer, places in original:
            buffer.param_index_map = places


def without_ranges(optimizer: Any) -> dict[str, Any]:
    """Return what a checkpoint has of a distributed optimizer beside the ranges of its ranks."""
    (part,) = parts_of(optimizer)
    return {**part.state_dict(), "param_state_sharding_type": _SHARDING}


class _Planner(PlainObjects, torch_format.MCoreLoadPlanner):
    """Loads objects beside the tensors with ``weights_only``."""


@contextmanager
def _restricted() -> Iterator[None]:
    """Have megatron-core load checkpoints in this process with `FolderReader` and `_Planner`."""
    reader, planner = torch_format._get_filesystem_reader, torch_format.MCoreLoadPlanner

    def safe(checkpoint_dir: str | Path, **_: Any) -> FolderReader:
        return FolderReader(checkpoint_dir)

    torch_format._get_filesystem_reader, torch_format.MCoreLoadPlanner = safe, _Planner
    try:
        yield
    finally:
        torch_format._get_filesystem_reader, torch_format.MCoreLoadPlanner = reader, planner


@contextmanager
def _steps_apart(optimizer: Any) -> Iterator[None]:
    """Keep a distributed optimizer from looking for torch Adam's step count among a parameter's tensors.

    The checkpoint holds the count with the parameter groups, from which it was set; megatron-core 0.16 looks
    nevertheless.
    """
    parts = [part for part in parts_of(optimizer) if isinstance(part, DistributedOptimizer)]
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
    """Give each parameter's step count its own tensor, since loading assigns one shared tensor, which each would
    advance.

    The count in the parameter groups is removed: torch's Adam would not advance it, and it would be read later.
    """
    if isinstance(part.optimizer, torch.optim.Adam):
        for state in part.optimizer.state.values():
            state["step"] = torch.as_tensor(state["step"]).clone()
        for group in part.optimizer.param_groups:
            group.pop("step", None)
