"""Checkpoints as megatron-core itself writes them, for comparison."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies import torch as torch_format
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed import checkpoint as dcp

from unicron_lightning.megatron.sharded import parts_of

if TYPE_CHECKING:
    from collections.abc import Iterator

CONTENT = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def save(path: str, ddp: Any, optimizer: Any, rest: dict[str, Any]) -> None:
    """Write a checkpoint with all ranks of torch's default group."""
    if dist.get_rank() == 0:
        Path(path).mkdir()
    dist.barrier()
    model = ddp.module.sharded_state_dict(metadata=dict(CONTENT))
    with _places_without_padding(optimizer):
        state = optimizer.sharded_state_dict(model, is_loading=False, metadata=dict(CONTENT))
    dist_checkpointing.save(
        {"model": model, "optimizer": state, "rest": rest},
        path,
        sharded_strategy=Writer(),
        preprocess_common_before_consistancy_check=lambda common: {k: v for k, v in common.items() if k != "rest"},
        content_metadata=dict(CONTENT),
    )
    dist.barrier()


class Writer(SaveShardedStrategy):
    """Writes megatron-core's format with torch's writer.

    Megatron-core's own writer forks processes and starts a manager that imports the user's script again. Both serve
    writing in the background and are unsafe in a process with threads, sockets and a GPU.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def can_handle_sharded_objects(self) -> bool:
        return True

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        grouped, _, _ = torch_format._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, keep_only_main_replica=True
        )
        dcp.save(
            torch_format.mcore_to_pyt_state_dict(grouped, is_loading=False),
            storage_writer=dcp.FileSystemWriter(str(checkpoint_dir)),
            planner=torch_format.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


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
