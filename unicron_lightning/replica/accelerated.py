"""A worker's process groups on an accelerator, such as NCCL's, from epoch to epoch.

Beside the connections of `Channels`, which carry data in host memory, an accelerator needs groups of its own. They are
made again in each epoch. The previous ones are aborted and destroyed by helper threads
(`worker.communication.lazy_groups`), and no epoch begins before their kernels have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from unicron_lightning.replica.channels import Channels
from unicron_lightning.worker.communication.lazy_groups import LazyGroups, Retirement, connect_apart


@dataclass(frozen=True, kw_only=True)
class AcceleratedGroup:
    """One group.

    Attributes:
        holder: torch's process group, which refers to the back-end.
        backend: the library's.
        size: number of members.
        inside: whether all members are in one replica.
    """

    holder: Any
    backend: Any
    size: int
    inside: bool


class AcceleratedGroups:
    """The present epoch's groups, and the aborts of earlier ones.

    Args:
        synchronize: waits until all kernels on the device have ended.
    """

    def __init__(self, synchronize: Callable[[torch.device], Any] = torch.cuda.synchronize) -> None:
        self._synchronize = synchronize
        self._settle: Callable[[], Any] = lambda: None
        self._present: Sequence[AcceleratedGroup] = ()
        self._retired: list[Retirement] = []

    def leave(self) -> bool:
        """Let helper threads abort and destroy the present groups; return whether there were any.

        The caller drops its references to them.
        """
        groups, self._present = self._present, ()
        if not groups:
            return False
        holders, backends = [group.holder for group in groups], [group.backend for group in groups]
        self._retired.append(Retirement(holders, backends, self._settle))
        return True

    def wait_retired(self, check: Callable[[], None]) -> None:
        """Wait until the kernels of earlier groups, which may still write to gradients, have ended.

        Raises:
            RuntimeError: an error of the accelerator, after which the process cannot continue.
            Exception: any exception of ``check``, which is called while waiting.
        """
        while self._retired:
            self._retired[0].wait_aborted(check)
            del self._retired[0]

    def connect(
        self,
        channels: Channels,
        groups: Sequence[AcceleratedGroup],
        device: torch.device,
        check: Callable[[], None],
    ) -> None:
        """Connect the groups of an epoch, which are then aborted with its channels.

        Args:
            channels: of the epoch.
            groups: in the order in which all ranks have made them.
            device: of the tensors.
            check: called while waiting; raises if the epoch has ended.

        Raises:
            CommunicatorAborted: a group could not be connected.
        """
        grid = channels.grid
        inner, outer = LazyGroups(), LazyGroups()
        inner.add_barrier(dist.PrefixStore(f"abort/{grid.place}", channels.store), grid.shard, grid.shards)
        outer.add_barrier(dist.PrefixStore("abort", channels.store), grid.rank, grid.shards * grid.replicas)
        channels.inner_accelerated, channels.outer_accelerated = inner, outer
        for group in groups:
            (inner if group.inside else outer).groups.append(group.backend)
        self._present, self._settle = tuple(groups), partial(self._synchronize, device)
        with_peers = [group.backend for group in groups if group.size > 1]
        connect_apart(with_peers, partial(_first, device=device), check)
        inner.meet()
        outer.meet()


def _first(group: Any, device: torch.device) -> Any:
    """Start a group's first collective, with which the library connects it."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of the helper thread
    return group.allreduce([torch.ones(1, device=device)])
