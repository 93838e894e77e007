"""The declared world of replicas, the assignment of an epoch's members to replicas and shards, and the numbering of the
active ones: pure functions of the members' descriptions.

A *replica* is S workers that hold the model together; its worker ``i`` holds *shard* ``i``. A worker keeps its shard
for its whole life, because its part of the model was built for it. Complete replicas continue; the workers of broken
ones are *spares*, and form new replicas with each other and with joiners as soon as every shard is present.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from unicron_lightning import wire
from unicron_lightning.errors import UnicronError


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The declared world: replicas of TP x max(CP, EP) x PP workers with Megatron, of S x T workers with FSDP2.

    The workers of a *lane* compute the same micro-batch. With FSDP2 worker ``i`` is in lane ``i // T``, and those at
    the same place of all lanes have the same slice of each tensor, which FSDP2 divides among them.

    Attributes:
        tensor: tensor-parallel size (TP), or the number of shards (S).
        pipeline: pipeline stages (PP); 1 for shards.
        expert: expert-parallel size (EP); 1 for shards.
        context: context-parallel size (CP): workers that divide each sequence; 1 for shards.
        replicas: model replicas (DP) without failures.
        sharded: whether each parameter is divided into shards (FSDP2).
        slices: tensor-parallel size of a lane (T) with FSDP2.
        virtual: virtual pipeline stages of each worker (Megatron's interleaved schedule); 1: that schedule is not used.
    """

    tensor: int
    pipeline: int = 1
    expert: int = 1
    context: int = 1
    replicas: int
    sharded: bool = False
    slices: int = 1
    virtual: int = 1

    @property
    def shards(self) -> int:
        """Workers of a replica, counted along tensor parallelism first, then along its columns, then its stages."""
        return self.tensor * self.columns * self.pipeline * self.slices

    @property
    def columns(self) -> int:
        """Workers of a stage that have the same slice of its layers: parts of a sequence, and lanes."""
        return self.layout.columns

    @property
    def width(self) -> int:
        """Micro-batches of a row: the number of a replica's lanes, which compute one each."""
        return self.tensor if self.sharded else self.layout.lanes

    @property
    def workers(self) -> int:
        """Workers of all replicas."""
        return self.shards * self.replicas

    @property
    def layout(self) -> wire.Layout:
        """Distribution of a replica."""
        sizes = {"tensor": self.tensor, "pipeline": self.pipeline, "expert": self.expert, "slices": self.slices}
        sizes["context"] = self.context
        return wire.Layout(**sizes, sharded=self.sharded)

    def coordinate(self, shard: int) -> tuple[int, int]:
        """Tensor-parallel rank and pipeline stage."""
        return shard % self.tensor, shard // (self.tensor * self.columns)

    def lane(self, shard: int) -> int:
        """Lane of a shard: the place of its micro-batch in each row."""
        return shard // self.slices if self.sharded else self.column(shard) // self.context

    def column(self, shard: int) -> int:
        """Column of a shard with Megatron: part of the sequence, then lane."""
        return shard // self.tensor % self.columns

    def shard(self, tensor: int, column: int, stage: int) -> int:
        """The shard at a place of a replica with Megatron."""
        return tensor + self.tensor * (column + self.columns * stage)

    def relaid(self, layout: wire.Layout) -> Shape:
        """The same number of workers in another layout, as ordered by an operator; one stage has no virtual ones."""
        sizes = {name: getattr(layout, name) for name in ("tensor", "pipeline", "expert", "context", "slices")}
        virtual = self.virtual if layout.pipeline > 1 else 1
        return replace(self, **sizes, virtual=virtual, replicas=self.workers // layout.workers)

    def grid(self, *, replicas: int, place: int, shard: int) -> Grid:
        """Place of a worker among the active ones."""
        return Grid(shape=self, replicas=replicas, place=place, shard=shard)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Numbering of the active workers, as Megatron's: tensor parallelism first, then columns, and pipeline stages last.

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
        shape = self.shape
        if shape.sharded:
            return shard + self.shards * place
        tensor, stage = shape.coordinate(shard)
        return tensor + shape.tensor * (shape.column(shard) + shape.columns * (place + self.replicas * stage))

    @property
    def rank(self) -> int:
        """This worker's rank in `torch.distributed`."""
        return self.number(self.place, self.shard)

    def partners(self) -> dict[int, int]:
        """Ranks of this worker's replica, with their shards."""
        return {self.number(self.place, shard): shard for shard in range(self.shards)}

    def within(self) -> Iterator[tuple[int, ...]]:
        """Sets of this worker's replica, as shards: its layers' slices, its pipeline, the pipeline's ends, and the
        whole replica; with several columns also its own, those among which a sequence or experts are divided, and
        those of `_equal_columns`. With FSDP2: its lane, the workers of its slice, and the whole replica.
        """
        shape = self.shape
        tensor, stage = shape.coordinate(self.shard)
        if shape.sharded:
            lane = shape.lane(self.shard)
            yield tuple(range(lane * shape.slices, (lane + 1) * shape.slices))
            yield tuple(range(self.shard % shape.slices, self.shards, shape.slices))
            yield tuple(range(self.shards))
            return
        slices, stages, column = range(shape.tensor), range(shape.pipeline), shape.column(self.shard)
        pipeline = tuple(shape.shard(tensor, column, other) for other in stages)
        yield tuple(shape.shard(other, column, stage) for other in slices)
        yield pipeline
        if len(stages) > 2 and stage in (0, len(stages) - 1):
            yield pipeline[0], pipeline[-1]
        blocks = [
            range(column // size * size, (column // size + 1) * size) for size in (1, shape.context, shape.expert)
        ]
        for columns in (*blocks, *self._equal_columns()):
            yield tuple(shape.shard(tensor, other, stage) for other in columns)
            yield tuple(shape.shard(other, each, stage) for each in columns for other in slices)
        for columns in (blocks[0], blocks[-1]):
            yield tuple(shape.shard(other, each, place) for place in stages for each in columns for other in slices)
        yield tuple(range(shape.shards))

    def _equal_columns(self) -> Iterator[range]:
        """Sets of columns: all, those with the same part of a sequence, those with the same experts, and this one."""
        shape, column = self.shape, self.shape.column(self.shard)
        for size in sorted({1, shape.context, shape.expert, shape.columns}):
            yield range(column % size, shape.columns, size)

    def across(self) -> Iterator[tuple[int, ...]]:
        """Sets of several replicas, as ranks: this worker's shard and, unless parameters are divided into shards, its
        stage and all ranks; with several columns also those of `_equal_columns`, with its slice or all.
        """
        shape = self.shape
        yield tuple(sorted(self.number(place, self.shard) for place in range(self.replicas)))
        if shape.sharded:
            return
        tensor, column = shape.coordinate(self.shard)[0], shape.column(self.shard)
        for columns in self._equal_columns():
            yield self._of_stage([tensor], columns)
        yield self._of_stage(range(shape.tensor), range(column % shape.context, shape.columns, shape.context))
        yield self._of_stage(range(shape.tensor))
        yield tuple(range(self.size))

    def same_slice(self) -> tuple[int, ...]:
        """Ranks of the same slice of this worker's stage with Megatron, in the columns of all replicas: the columns of
        a replica are successive.
        """
        return self._of_stage([self.shape.coordinate(self.shard)[0]])

    def _of_stage(self, slices: Sequence[int], columns: Sequence[int] = ()) -> tuple[int, ...]:
        shape, stage = self.shape, self.shape.coordinate(self.shard)[1]
        columns = columns or range(shape.columns)
        shards = [shape.shard(other, column, stage) for column in columns for other in slices]
        return tuple(sorted(self.number(place, shard) for place in range(self.replicas) for shard in shards))


class StateLost(UnicronError):
    """No present worker holds some shard with the newest step's state: training can continue only from a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class ShardReport:
    """A worker's description of itself.

    Attributes:
        shard: the part of the model that it has built; None before its first epoch.
        replica: name of the replica in which it is active; None for a spare.
        intact: whether its connections within the replica work.
        at: optimizer steps in its parameters; None if it has no state.
        ready: whether the next step lacks only the update itself.
        built: whether it has built its part of the model, and so takes part in the exchanges about it.
    """

    shard: int | None = None
    replica: str | None = None
    intact: bool = False
    at: int | None = None
    ready: bool = False
    built: bool = False

    def plain(self) -> list[Any]:
        """The description as JSON without names, since each member receives that of all."""
        return list(astuple(self))

    @classmethod
    def from_plain(cls, data: Sequence[Any]) -> ShardReport:
        """The description from the result of `plain`."""
        shard, replica, intact, at, ready, built = data
        return cls(shard=shard, replica=replica, intact=intact, at=at, ready=ready, built=built)


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One replica of an epoch.

    Attributes:
        name: unique over all replicas of the task's life.
        members: the workers' ranks in the epoch, by shard.
        continues: whether it existed before, so that its partial gradients are valid.
        carried: whether its workers keep their earlier connections among each other.
    """

    name: str
    members: tuple[int, ...]
    continues: bool
    carried: bool


@dataclass(frozen=True, kw_only=True)
class ReplicaLayout:
    """The parts of an epoch's members.

    Attributes:
        replicas: the active ones.
        shards: by rank.
        stale: ranks of active workers that must get their shard's state from others.
        newest: optimizer steps in the newest state.
    """

    replicas: tuple[Replica, ...]
    shards: tuple[int, ...]
    stale: frozenset[int]
    newest: int

    def place(self, rank: int) -> int | None:
        """The place among the replicas of the replica of an epoch rank; None for a spare."""
        return next((place for place, replica in enumerate(self.replicas) if rank in replica.members), None)

    def is_surplus(self, rank: int, shape: Shape) -> bool:
        """Whether a spare is of no use with its shard: more workers hold it than there are replicas, or a replica
        lacks another shard and will not get it from a spare.
        """
        if self.place(rank) is not None:
            return False
        spares = [[each for each, own in enumerate(self.shards) if own == shard] for shard in range(shape.shards)]
        same = len(spares[self.shards[rank]])
        spares = [[each for each in ranks if self.place(each) is None] for ranks in spares]
        own = spares[self.shards[rank]]
        too_many = max(0, same - shape.replicas)
        if len(self.replicas) < shape.replicas:
            too_many = max(too_many, (len(own) - min(map(len, spares))) // 2)
        return rank in own[len(own) - too_many :]

    def missing(self, shape: Shape) -> list[int]:
        """Shards that are missing to complete all declared replicas, most urgent first."""
        active = {rank for replica in self.replicas for rank in replica.members}
        idle = [shard for rank, shard in enumerate(self.shards) if rank not in active]
        lacking = []
        for _ in range(shape.replicas - len(self.replicas)):
            for shard in range(shape.shards):
                if shard in idle:
                    idle.remove(shard)
                else:
                    lacking.append(shard)
        return lacking


def plan_layout(epoch: int, words: Sequence[ShardReport], shape: Shape, *, even: bool = True) -> ReplicaLayout:
    """Assign each member its part.

    Args:
        epoch: number of the epoch, for names.
        words: by rank.
        shape: declared.
        even: whether all members that have the state are in the same operation.

    Raises:
        StateLost: no replica can be formed that has the newest state of every shard.
    """
    shards = _shards(words, shape)
    newest = max((word.at for word in words if word.at is not None), default=0)
    updated = {rank for rank, word in enumerate(words) if word.at == newest}
    fresh = updated | {rank for rank, word in enumerate(words) if word.ready and word.at == newest - 1}
    # Between two workers' updates nothing can be copied: a worker about to update does so by itself. Between two
    # operations neither: what the script does there would be missing in the copy, or be done in it twice.
    settled = even and updated == fresh
    whole = _whole(words, shards, shape, fresh)[: shape.replicas]
    taken = {rank for _, members in whole for rank in members}
    pool = [rank for rank in range(len(words)) if rank not in taken and (settled or rank in fresh)]
    formed = _form(pool, shards, shape, fresh, shape.replicas - len(whole))
    if not whole and not (formed and fresh.issuperset(formed[0])):
        raise StateLost(f"of {len(words)} workers in epoch {epoch}, none can continue from step {newest}")
    replicas = [
        Replica(name=name, members=members, continues=True, carried=all(words[rank].intact for rank in members))
        for name, members in whole
    ]
    replicas += [
        Replica(name=f"{epoch}/{place}", members=members, continues=False, carried=False)
        for place, members in enumerate(formed)
    ]
    active = {rank for replica in replicas for rank in replica.members}
    return ReplicaLayout(
        replicas=tuple(replicas),
        shards=tuple(shards),
        stale=frozenset(active - updated) if settled else frozenset(),
        newest=newest,
    )


def _shards(words: Sequence[ShardReport], shape: Shape) -> list[int]:
    """Founders take shards in rank order, so that a replica's workers are neighbours."""
    founders, shards = 0, []
    for word in words:
        if word.shard is None:
            shards.append(founders % shape.shards)
            founders += 1
        else:
            shards.append(word.shard)
    return shards


def _whole(
    words: Sequence[ShardReport], shards: Sequence[int], shape: Shape, fresh: set[int]
) -> list[tuple[str, tuple[int, ...]]]:
    """Earlier replicas with all workers present, oldest first."""
    named: dict[str, dict[int, int]] = {}
    for rank, word in enumerate(words):
        if word.replica is not None and rank in fresh:
            named.setdefault(word.replica, {})[shards[rank]] = rank
    whole = [(name, members) for name, members in named.items() if len(members) == shape.shards]
    whole.sort(key=lambda entry: tuple(map(int, entry[0].split("/"))))
    return [(name, tuple(members[shard] for shard in range(shape.shards))) for name, members in whole]


def _form(
    pool: Sequence[int], shards: Sequence[int], shape: Shape, fresh: set[int], most: int
) -> list[tuple[int, ...]]:
    """New replicas from the workers of ``pool``, those with the newest state first."""
    waiting = [
        sorted((rank for rank in pool if shards[rank] == shard), key=lambda rank: (rank not in fresh, rank))
        for shard in range(shape.shards)
    ]
    number = min(most, *(len(ranks) for ranks in waiting))
    return [tuple(ranks[place] for ranks in waiting) for place in range(number)]
