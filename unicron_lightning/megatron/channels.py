"""Connections of a grid of replicas: one group, which can be cut, for each set of workers that has a Megatron group.

Megatron makes some twenty process groups, most of them of the same few sets of workers; those share one connection
here. Sets within a replica outlive the epoch if the replica does; sets across replicas are made again in each epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from unicron_lightning.megatron.layout import Shape
from unicron_lightning.megatron.peers import PeerGroup
from unicron_lightning.worker.communicator import SoloCommunicator
from unicron_lightning.worker.gloo import GlooCommunicator
from unicron_lightning.worker.lazy_groups import abort_apart


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Megatron's numbering of the active workers, tensor parallelism first and pipeline stages last.

    Attributes:
        shape: of a replica.
        replicas: number of active replicas.
        place, shard: of this worker.
    """

    shape: Shape
    replicas: int
    place: int
    shard: int

    @property
    def size(self) -> int:
        """Number of active workers."""
        return self.replicas * self.shape.shards

    def number(self, place: int, shard: int) -> int:
        """A worker's rank in `torch.distributed`."""
        tensor, stage = self.shape.coordinate(shard)
        return tensor + self.shape.tensor * (place + self.replicas * stage)

    @property
    def rank(self) -> int:
        """This worker's rank in `torch.distributed`."""
        return self.number(self.place, self.shard)

    def within(self) -> Iterator[tuple[int, ...]]:
        """Sets of this worker's replica, as shards: its stage, its pipeline, the pipeline's ends, and the whole
        replica.
        """
        tensor, stage = self.shape.coordinate(self.shard)
        size, stages = self.shape.tensor, self.shape.pipeline
        column = tuple(tensor + size * other for other in range(stages))
        yield tuple(range(size * stage, size * (stage + 1)))
        yield column
        if stages > 2 and stage in (0, stages - 1):
            yield column[0], column[-1]
        yield tuple(range(self.shape.shards))

    def across(self) -> Iterator[tuple[int, ...]]:
        """Sets of several replicas, as ranks: this worker's shard, its stage, and all ranks."""
        _, stage = self.shape.coordinate(self.shard)
        size, every = self.shape.tensor, range(self.replicas)
        yield tuple(sorted(self.number(place, self.shard) for place in every))
        yield tuple(sorted(self.number(place, size * stage + other) for place in every for other in range(size)))
        yield tuple(range(self.size))


class Channels:
    """This worker's connections in one grid.

    The constructor blocks until all peers are connected.

    Args:
        grid: its place.
        store: a client without other users, with a prefix fresh to this epoch.
        host: address of this machine that peers can reach.
        carried: connections within the replica that are kept, by shards; not closed here.
        mirrors: whether copies of optimizer shards will be exchanged.

    Attributes:
        inner: within the replica, by shards.
        outer: across replicas, by ranks.
        exchange: among the workers of this shard, in the order of replicas, for tensors in host memory; None without
            mirrors.
        inner_accelerated, outer_accelerated: NCCL's groups of the same sets, made by `world.enter_world`.
    """

    def __init__(
        self,
        grid: Grid,
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
        self.inner_accelerated: list[Any] = []
        self.outer_accelerated: list[Any] = []
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
                    self.outer[ranks] = self._open(name, ranks.index(grid.rank), len(ranks), host)
            if mirrors and grid.replicas == 1:
                self.exchange = SoloCommunicator()
            elif mirrors:
                beside = dist.PrefixStore(f"mirrors/{grid.shard}", store)
                self.exchange = GlooCommunicator(beside, grid.place, grid.replicas, host)
        except (RuntimeError, OSError):
            self.close()
            raise

    def group(self, ranks: tuple[int, ...]) -> PeerGroup:
        """The connections of a set of ranks that includes this worker.

        Raises:
            KeyError: Megatron has a group that `Grid` does not know.
        """
        shards = self.shards(ranks)
        return self.outer[ranks] if shards is None else self.inner[shards]

    def shards(self, ranks: tuple[int, ...]) -> tuple[int, ...] | None:
        """The shards of a set of ranks of this replica; None if the set has ranks of other replicas."""
        grid = self.grid
        own = {grid.number(grid.place, shard): shard for shard in range(grid.shape.shards)}
        return tuple(own[rank] for rank in ranks) if own.keys() >= set(ranks) else None

    def cut(self) -> None:
        """Release all waits for other replicas."""
        for group in list(self.outer.values()):
            group.cut()
        if self.exchange is not None:
            self.exchange.abort("the connections between replicas were cut")
        abort_apart(self.outer_accelerated)

    def close(self) -> None:
        """Release all connections but those that were carried, or adopted meanwhile."""
        for group in self.outer.values():
            group.close()
        self.outer = {}
        if self.exchange is not None:
            self.exchange.close()
        if not self.adopted:
            for group in self.inner.values():
                group.close()

    def _open(self, name: str, rank: int, world: int, host: str) -> PeerGroup:
        return PeerGroup(dist.PrefixStore(name, self.store), rank, world, host)
