"""The declared world of replicas, and the numbering of the workers that are active in an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from unicron_lightning import wire


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The declared world: replicas of TP x PP workers with Megatron, of S shards with FSDP2.

    Attributes:
        tensor: tensor-parallel size (TP), or the number of shards (S).
        pipeline: pipeline stages (PP); 1 for shards.
        replicas: model replicas (DP) without failures.
        sharded: whether each parameter is divided into shards (FSDP2).
    """

    tensor: int
    pipeline: int = 1
    replicas: int
    sharded: bool = False

    @property
    def shards(self) -> int:
        """Workers of a replica, counted along tensor parallelism first."""
        return self.tensor * self.pipeline

    @property
    def workers(self) -> int:
        """Workers of all replicas."""
        return self.shards * self.replicas

    @property
    def layout(self) -> wire.Layout:
        """Distribution of a replica."""
        return wire.Layout(tensor=self.tensor, pipeline=self.pipeline, sharded=self.sharded)

    def coordinate(self, shard: int) -> tuple[int, int]:
        """Tensor-parallel rank and pipeline stage."""
        return shard % self.tensor, shard // self.tensor

    def relaid(self, layout: wire.Layout) -> Shape:
        """The same number of workers in another layout, as ordered by an operator."""
        return replace(self, tensor=layout.tensor, pipeline=layout.pipeline, replicas=self.workers // layout.workers)

    def grid(self, *, replicas: int, place: int, shard: int) -> Grid:
        """Place of a worker among the active ones."""
        return Grid(shape=self, replicas=replicas, place=place, shard=shard)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Numbering of the active workers, as Megatron's: tensor parallelism first and pipeline stages last.

    It gives the sets of workers with which a worker exchanges tensors, in the same order on all workers; each kind of
    set divides the active workers. Megatron makes some twenty process groups, most of them of the same few sets; those
    share a connection.

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
    def shards(self) -> int:
        """Workers of a replica."""
        return self.shape.shards

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
        """Sets of several replicas, as ranks: this worker's shard and, unless parameters are divided into shards, its
        stage and all ranks.
        """
        _, stage = self.shape.coordinate(self.shard)
        size, every = self.shape.tensor, range(self.replicas)
        yield tuple(sorted(self.number(place, self.shard) for place in every))
        if not self.shape.sharded:
            yield tuple(sorted(self.number(place, size * stage + other) for place in every for other in range(size)))
            yield tuple(range(self.size))
