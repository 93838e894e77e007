"""NCCL's groups of a sharded model on CUDA devices.

One is of the workers of the replica, for FSDP2, and one of the workers of this shard in all replicas, for the
gradients. A kernel that waits for a dead worker ends by the abort of its group only, and then looks complete, so a call
counts only after `ReplicaFabric.arrive` (decision 18).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from unicron_lightning.replica.channels import AcceleratedGroup, AcceleratedGroups, Channels
from unicron_lightning.worker.communication.nccl import make_group

Make = Callable[[dist.Store, int, int, torch.device], tuple[Any, Any]]
"""Makes a group: (store, rank, world, device); returns torch's process group and the library's back-end."""


def nccl_group(store: dist.Store, rank: int, world: int, device: torch.device) -> tuple[Any, Any]:
    """Make an unconnected group of NCCL for tensors on ``device``."""
    backend = make_group(store, rank, world, device)
    holder = dist.ProcessGroup(dist.HashStore(), rank, world)
    holder._register_backend(torch.device(device.type), dist.ProcessGroup.BackendType.NCCL, backend)
    return holder, backend


class ShardAccelerator:
    """Makes and leaves the groups of each epoch.

    Args:
        device: of the model.
        check: raises if the present epoch has ended.
        groups: aborts and destroys groups.
        make: makes one.
    """

    def __init__(
        self,
        device: torch.device,
        check: Callable[[], None],
        groups: AcceleratedGroups | None = None,
        make: Make = nccl_group,
    ) -> None:
        self._device = device
        self._check = check
        self._groups = groups or AcceleratedGroups()
        self._make = make

    def leave(self) -> None:
        """Let helper threads abort and destroy the groups, to which the caller must not refer any more."""
        self._groups.leave()

    def settle(self) -> None:
        """Wait until no kernel of groups that were left writes to a tensor."""
        self._groups.wait_retired(self._check)

    def enter(self, channels: Channels) -> tuple[Any, Any]:
        """Make and connect an epoch's groups.

        Returns:
            Torch's process groups of the replica, and of the shard; the latter is None for the only replica.

        Raises:
            CommunicatorAborted: a group could not be connected.
        """
        grid = channels.grid
        inner = self._group(channels, f"inner/{grid.place}", grid.shard, grid.shards, inside=True)
        groups = [inner]
        if grid.replicas > 1:
            groups.append(self._group(channels, f"outer/{grid.shard}", grid.place, grid.replicas, inside=False))
        self._groups.connect(channels, groups, self._device, self._check)
        return inner.holder, groups[1].holder if len(groups) > 1 else None

    def _group(self, channels: Channels, name: str, rank: int, size: int, *, inside: bool) -> AcceleratedGroup:
        store = dist.PrefixStore(f"accelerated/{name}", channels.store)
        holder, backend = self._make(store, rank, size, self._device)
        return AcceleratedGroup(holder=holder, backend=backend, size=size, inside=inside)


def accelerator_for(device: torch.device, check: Callable[[], None]) -> ShardAccelerator | None:
    """Return what a model on this device needs beside gloo: nothing on the CPU."""
    return ShardAccelerator(device, check) if device.type == "cuda" else None
