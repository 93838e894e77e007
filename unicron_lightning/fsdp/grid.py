"""The world of a sharded model: replicas of S workers, each with one shard of every parameter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from unicron_lightning import wire


@dataclass(frozen=True, kw_only=True)
class ShardedShape:
    """The declared world.

    Attributes:
        shards: workers of a replica (S).
        replicas: replicas without failures.
    """

    shards: int
    replicas: int

    def tells(self, shard: int) -> bool:
        """Whether a worker reports results of its micro-batches; each runs its own ones of a row."""
        return True

    def relaid(self, layout: wire.Layout) -> ShardedShape:
        """The same number of workers with another number of shards."""
        size = layout.tensor * layout.pipeline
        return ShardedShape(shards=size, replicas=self.shards * self.replicas // size)

    def grid(self, *, replicas: int, place: int, shard: int) -> ShardedGrid:
        """Place of a worker among the active ones."""
        return ShardedGrid(shards=self.shards, replicas=replicas, place=place, shard=shard)


@dataclass(frozen=True, kw_only=True)
class ShardedGrid:
    """Numbering of the active workers: the shards of the first replica, then those of the second, and so on.

    Attributes:
        shards: workers of a replica.
        replicas: number of active replicas.
        place, shard: of this worker.
    """

    shards: int
    replicas: int
    place: int
    shard: int

    def number(self, place: int, shard: int) -> int:
        """Rank of a worker."""
        return place * self.shards + shard

    @property
    def rank(self) -> int:
        """Rank of this worker."""
        return self.number(self.place, self.shard)

    def within(self) -> Iterator[tuple[int, ...]]:
        """The set of this replica's shards."""
        yield tuple(range(self.shards))

    def across(self) -> Iterator[tuple[int, ...]]:
        """The set of this shard's workers in all replicas, as ranks."""
        yield tuple(self.number(place, self.shard) for place in range(self.replicas))
