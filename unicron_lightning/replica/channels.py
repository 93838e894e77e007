"""A worker's connections in a world of replicas: one group, which can be cut, for each set of workers of a topology.

Sets within a replica outlive the epoch if the replica does; sets across replicas are made again in each epoch, with
about 2 log2 n connections of a worker in a set of n.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch.distributed as dist

from unicron_lightning.replica.peers import PeerGroup
from unicron_lightning.worker.communication.communicator import SoloCommunicator
from unicron_lightning.worker.communication.gloo import GlooCommunicator
from unicron_lightning.worker.communication.lazy_groups import LazyGroups
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
