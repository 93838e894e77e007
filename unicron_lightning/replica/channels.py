"""A worker's connections in a world of replicas: one group, which can be cut, for each set of workers of a topology.

Sets within a replica outlive the epoch if the replica does; sets across replicas are made again in each epoch, with
about 2 log2 n connections of a worker in a set of n.

They carry data in host memory. An accelerator, such as with NCCL, needs groups of its own beside them
(`AcceleratedGroups`), which are made again in each epoch. The previous ones are aborted and destroyed by helper threads
(`worker.communication.lazy_groups`), and no epoch begins before their kernels have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from unicron_lightning.replica.peers import PeerGroup
from unicron_lightning.worker.communication.communicator import SoloCommunicator
from unicron_lightning.worker.communication.gloo import GlooCommunicator
from unicron_lightning.worker.communication.lazy_groups import LazyGroups, Retirement, connect_apart
from unicron_lightning.worker.control.activity import Activity


class Topology(Protocol):
    """Place of a worker among the active ones, and the sets of workers with which it exchanges tensors.

    Active workers are numbered by rank. Both iterators give sets in the same order on all workers, and each kind of set
    divides the active workers.
    """

    @property
    def shards(self) -> int:
        """Workers of a replica (S)."""

    @property
    def replicas(self) -> int:
        """Number of active replicas."""

    @property
    def place(self) -> int:
        """Place of this worker's replica among the replicas."""

    @property
    def shard(self) -> int:
        """Shard of this worker."""

    @property
    def rank(self) -> int:
        """Rank of this worker."""

    def number(self, place: int, shard: int) -> int:
        """Rank of a worker."""

    def within(self) -> Iterator[tuple[int, ...]]:
        """Sets of this worker's replica, as shards."""

    def across(self) -> Iterator[tuple[int, ...]]:
        """Sets of several replicas, as ranks; one of them is the workers of this shard."""


class Channels:
    """This worker's connections in one epoch.

    The constructor blocks until all peers are connected.

    Args:
        grid: its place, and the sets.
        store: a client without other users, with a prefix fresh to this epoch.
        host: address of this machine that peers can reach.
        carried: connections within the replica that are kept, by shards; not closed here.
        mirrors: whether copies of optimizer shards will be exchanged.

    Attributes:
        inner: within the replica, by shards.
        outer: across replicas, by ranks.
        exchange: among the workers of this shard, in the order of replicas, for tensors in host memory; None without
            mirrors.
        inner_accelerated, outer_accelerated: NCCL's groups of the same sets, made by the strategy.
    """

    def __init__(
        self,
        grid: Topology,
        store: dist.Store,
        host: str,
        carried: Mapping[tuple[int, ...], PeerGroup] | None,
        *,
        mirrors: bool = False,
    ) -> None:
        self.grid = grid
        self.store = store
        self.inner: dict[tuple[int, ...], PeerGroup] = dict(carried or {})
        self.outer: dict[tuple[int, ...], PeerGroup] = {}
        self.inner_accelerated = LazyGroups()
        self.outer_accelerated = LazyGroups()
        self.exchange: GlooCommunicator | SoloCommunicator | None = None
        self.adopted = carried is not None
        try:
            # All workers use the same order, and each kind of set divides the grid, so no two wait for each other.
            for shards in grid.within():
                if len(shards) > 1 and shards not in self.inner:
                    name = "inner/" + "-".join(map(str, (grid.place, *shards)))
                    self.inner[shards] = self._open(name, shards.index(grid.shard), len(shards), host)
            for ranks in grid.across():
                if grid.replicas > 1 and ranks not in self.outer:
                    name = "outer/" + "-".join(map(str, ranks))
                    self.outer[ranks] = self._open(name, ranks.index(grid.rank), len(ranks), host, all_pairs=False)
            if mirrors and grid.replicas == 1:
                self.exchange = SoloCommunicator()
            elif mirrors:
                beside = dist.PrefixStore(f"mirrors/{grid.shard}", store)
                self.exchange = GlooCommunicator(beside, grid.place, grid.replicas, host)
        except (RuntimeError, OSError):
            self.close()
            raise

    @property
    def same_shard(self) -> PeerGroup:
        """The connections of the workers of this shard, in the order of replicas, of which there are several."""
        grid = self.grid
        return self.outer[tuple(sorted(grid.number(place, grid.shard) for place in range(grid.replicas)))]

    def group(self, ranks: tuple[int, ...]) -> PeerGroup:
        """The connections of a set of ranks that includes this worker.

        Raises:
            KeyError: the topology lacks the set.
        """
        shards = self.shards(ranks)
        return self.outer[ranks] if shards is None else self.inner[shards]

    def shards(self, ranks: tuple[int, ...]) -> tuple[int, ...] | None:
        """The shards of a set of ranks of this replica; None if the set has ranks of other replicas."""
        grid = self.grid
        own = {grid.number(grid.place, shard): shard for shard in range(grid.shards)}
        return tuple(own[rank] for rank in ranks) if own.keys() >= set(ranks) else None

    def record_waits(self, activity: Activity) -> None:
        """Record the training thread's waits for peers."""
        for group in (*self.inner.values(), *self.outer.values()):
            group.activity = activity

    def cut(self) -> None:
        """Release all waits for other replicas."""
        for group in list(self.outer.values()):
            group.cut()
        if self.exchange is not None:
            self.exchange.abort("the connections between replicas were cut")
        self.outer_accelerated.abort()

    def close(self) -> None:
        """Release all connections but those that were carried, or adopted meanwhile."""
        for group in self.outer.values():
            group.close()
        self.outer = {}
        if self.exchange is not None:
            self.exchange.close()
        self.outer_accelerated.close()
        if not self.adopted:
            for group in self.inner.values():
                group.close()

    def _open(self, name: str, rank: int, world: int, host: str, *, all_pairs: bool = True) -> PeerGroup:
        return PeerGroup(dist.PrefixStore(name, self.store), rank, world, host, all_pairs=all_pairs)


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
