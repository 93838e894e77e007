"""Megatron's process groups, made without communication from existing connections.

`torch.distributed` gets a back-end ``unicron``, which returns the connection for a requested set of ranks. Megatron's
own `initialize_model_parallel` thus runs unchanged, and cannot block on a worker that has died. While a model is built,
the connections are dummies: construction needs ranks and sizes, but no peers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch._C._distributed_c10d import FakeProcessGroup

from unicron_lightning.replica.channels import AcceleratedGroup, AcceleratedGroups, Channels, ProcessGroup
from unicron_lightning.replica.layout import Grid, Shape
from unicron_lightning.worker.communication.gloo import OPERATION_TIMEOUT

BACKEND: Final = "unicron"
ROLES: Final = (
    *("tp", "pp", "mp", "embd", "pos_embd", "cp", "tp_cp", "ep", "expt_tp", "tp_ep", "tp_ep_pp"),
    *("tp_dp_cp", "dp", "dp_cp", "expt_dp", "intra_dp_cp", "intra_expt_dp", "inter_dist_opt", "intra_dist_opt"),
)
"""Megatron's names of its groups."""

Groups = dict[str, dist.ProcessGroup]

_provide: Callable[[tuple[int, ...], int], Any] | None = None
_groups = AcceleratedGroups()
"""NCCL's groups of the present epoch, and the aborts of earlier ones."""


def build_world(shape: Shape, shard: int, device: torch.device) -> None:
    """Enter the whole declared world with groups that exchange nothing, for the construction of a model.

    Args:
        shape: declared.
        shard: of this worker, which takes the first replica's place.
        device: of the model.
    """
    grid = shape.grid(replicas=shape.replicas, place=0, shard=shard)

    def provide(ranks: tuple[int, ...], rank: int) -> Any:
        return FakeProcessGroup._create_internal(rank, len(ranks))

    if device.type == "cuda":  # torch's own dummies serve all devices; its module registers them
        importlib.import_module("torch.testing._internal.distributed.fake_pg")
    _initialize(shape, grid, dist.HashStore(), provide, "fake" if device.type == "cuda" else BACKEND)


def enter_world(channels: Channels, shape: Shape, device: torch.device, check: Callable[[], None]) -> Groups:
    """Enter the groups of an epoch's grid, and connect those of NCCL.

    Args:
        channels: of the epoch.
        shape: declared.
        device: of the model.
        check: raises if the epoch has ended; called while NCCL connects.

    Returns:
        Megatron's groups by role.

    Raises:
        CommunicatorAborted: a group of NCCL could not be connected.
    """
    leave_world()
    _groups.wait_retired(check)
    grid = channels.grid
    alone = dist.HashStore()

    def provide(ranks: tuple[int, ...], rank: int) -> Any:
        if len(ranks) == 1:
            return dist.ProcessGroupGloo(dist.PrefixStore(str(ranks), alone), 0, 1, timeout=OPERATION_TIMEOUT)
        group = channels.group(ranks)
        if device.type == "cuda":
            return group.backend
        made = ProcessGroup(group, rank, len(ranks))
        if len(ranks) == grid.size and grid.shards > 1:
            # Megatron's interleaved schedule sends messages between two stages through the world's group, too. Failures
            # of other replicas must not interrupt them.
            made.route(channels.inner[tuple(range(grid.shards))], grid.partners())
        return made

    backend = f"cpu:{BACKEND},cuda:nccl" if device.type == "cuda" else BACKEND
    _initialize(shape, grid, channels.store, provide, backend)
    if device.type == "cuda":
        _groups.connect(channels, _accelerated(channels, device), device, check)
    return current_groups()


def _accelerated(channels: Channels, device: torch.device) -> list[AcceleratedGroup]:
    """The epoch's groups with their back-ends of NCCL, in the order in which all ranks have made them."""
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    return [
        AcceleratedGroup(
            holder=group,
            backend=group._get_backend(device),
            size=group.size(),
            inside=channels.shards(tuple(dist.get_process_group_ranks(group))) is not None,
            messages=group is pipeline,
        )
        for group in dist.distributed_c10d._world.pg_map
    ]


def leave_world() -> None:
    """Destroy the groups; their connections stay. Those of NCCL are aborted and destroyed by a helper thread."""
    if not dist.is_initialized():
        return
    parallel_state.destroy_model_parallel()
    if _groups.leave():
        dist.distributed_c10d._world.pg_names.clear()  # torch shuts down the groups listed there, and would block
    dist.destroy_process_group()


def current_groups() -> Groups:
    """Megatron's present groups by role."""
    collection = ProcessGroupCollection.use_mpu_process_groups(list(ROLES))
    groups = {role: group for role in ROLES if isinstance(group := getattr(collection, role, None), dist.ProcessGroup)}
    world = dist.group.WORLD
    assert world is not None
    return {**groups, "world": world}


def _initialize(
    shape: Shape, grid: Grid, store: dist.Store, provide: Callable[[tuple[int, ...], int], Any], backend: str
) -> None:
    global _provide
    leave_world()
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _make, extended_api=True, devices=["cpu"])
    everyone = tuple(range(grid.replicas * grid.shards))
    _provide = lambda ranks, rank: provide(ranks or everyone, rank)  # noqa: E731 - torch passes no ranks for the world
    try:
        dist.init_process_group(backend, store=store, rank=grid.rank, world_size=len(everyone))
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=shape.tensor,
            pipeline_model_parallel_size=shape.pipeline,
            virtual_pipeline_model_parallel_size=shape.virtual if shape.virtual > 1 else None,
            context_parallel_size=shape.context,
            expert_model_parallel_size=shape.expert,
            create_gloo_process_groups=False,
        )
    finally:
        _provide = None


def _make(options: Any, _: Any) -> Any:
    """Make a group of this worker; called by `torch.distributed`."""
    assert _provide is not None, "a process group was made outside the epoch's beginning"
    return _provide(tuple(options.global_ranks_in_group), options.group_rank)
