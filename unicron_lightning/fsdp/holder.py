"""A worker's part in a world of replicas of a sharded model, for any host of the training."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from unicron_lightning import wire
from unicron_lightning.checkpoints.saving import WriteFile
from unicron_lightning.data.passes import RowPart
from unicron_lightning.fsdp.mesh import ShardGroup, holds_first, local_shard, region, reshard
from unicron_lightning.fsdp.model import FsdpShard
from unicron_lightning.fsdp.rows import number_of_rows
from unicron_lightning.replica.fabric import EpochPlace, ReplicaFabric, run_released
from unicron_lightning.replica.layout import Shape
from unicron_lightning.replica.member import ReplicaMember
from unicron_lightning.worker import codec
from unicron_lightning.worker.codec import unpack_parts
from unicron_lightning.worker.engine import Engine, World
from unicron_lightning.worker.operations import Agreement
from unicron_lightning.worker.reproducible import digest_from, state_tensors, weighted
from unicron_lightning.worker.rows import Balance, present
from unicron_lightning.worker.session import Session


class ShardHolder:
    """Holds a shard of the model, and takes it from epoch to epoch. The methods are in the order of a run's calls.

    Args:
        shape: declared world; an operator's order replaces it.
        open_ended: see `ReplicaFabric`.

    Attributes:
        fabric: this worker's connections and place.
        member: with its shard of the model.
    """

    def __init__(self, shape: Shape, *, open_ended: bool = False) -> None:
        self.fabric = ReplicaFabric(shape, open_ended=open_ended)
        self.member: ReplicaMember[FsdpShard] = ReplicaMember(self.fabric, FsdpShard.adopt, self._leave)
        self._founded = False

    @property
    def part(self) -> RowPart:
        """This worker's part of each row, which the workers of its lane share."""
        shape, shard = self.fabric.shape, self.fabric.own_shard
        together, speaks = shape.shards > 1, shard % shape.slices == 0

        def exchange(word: int) -> list[int]:
            return self.member.model.group.same_slice.exchange(word)

        lane = shape.lane(shard)
        return RowPart(size=shape.width, shard=lane, together=together, speaks=speaks, exchange=exchange)

    @property
    def place(self) -> EpochPlace:
        """This worker's place in the present epoch."""
        assert self.fabric.place is not None, "no epoch entered"
        return self.fabric.place

    @property
    def is_spare(self) -> bool:
        """Whether this worker takes part in no update: it is in no replica, and has no sums of one that it left."""
        place = self.fabric.place
        return place is not None and place.replica is None and self.fabric.phase != "ready"

    def begin(self, session: Session) -> None:
        """Begin with a session that was made with the fabric."""
        self.fabric.begin(session.control, joins=session.is_joiner)

    def make_group(self, session: Session, local_rank: int) -> ShardGroup:
        """Return the group of this replica's workers; a founder has entered its first epoch."""
        self._founded = session.is_joiner  # the others do not found the task again with it, in a later run
        if session.is_joiner:
            self.fabric.take_shard(local_rank)
        return ShardGroup(self.fabric.own_shard, self.fabric.shape.shards, self.fabric.shape.slices)

    def hold(self, model: FsdpShard, micro_batches: int) -> None:
        """Take this worker's shard of the model.

        Args:
            model: built.
            micro_batches: of a whole step, for the coordinator.
        """
        fabric, shape = self.fabric, self.fabric.shape
        self.member.model = model
        if model.accelerator is not None:
            atexit.register(model.close)
        fabric.built = True
        fabric.spread = wire.Spread(
            layout=shape.layout,
            ordered=fabric.ordered,
            workers=shape.workers,
            micro_batches=micro_batches,
            tensor_divides={},
            pipeline_divides={},
        )

    def found(self, engine: Engine) -> None:
        """Begin the task with the same parameters in all replicas, once."""
        if not self._founded:
            self._founded = True
            self.member.found(engine)

    def enter(self, world: World, engine: Callable[[], Engine]) -> None:
        """Enter an epoch, before any work in it.

        Raises:
            CommunicatorAborted, EpochChanged: a member failed.
        """
        if world.epoch > 0:
            self.member.enter(engine())

    def share(self, micro_batches: Sequence[int], balance: Balance | None = None) -> list[int]:
        """Return this worker's micro-batches of a step in the present world."""
        number = number_of_rows(micro_batches, self.fabric.shape.width)
        rows = self.member.share(range(number), None if balance is None else balance.counts(number))
        return [micro_batches[self.part.own(row, len(micro_batches))[0]] for row in rows]

    def own(self, in_full_step: Sequence[int], balance: Balance | None = None) -> list[int]:
        """Return this worker's micro-batches of a step of streams; ``in_full_step`` as of `worker.rows.shares_of`."""
        size = self.fabric.shape.width
        whole = range(number_of_rows(range(in_full_step[-1] + 1), size) * size)
        return present(self.share(whole, balance), in_full_step)

    def released(self, run: Callable[[int], None]) -> Callable[[int], None]:
        """See `ReplicaFabric.released`."""
        return self.fabric.released(run, self.member.model.device)

    def writing(self, engine: Engine, write: Callable[[list[Any]], str]) -> WriteFile:
        """Return the operation that writes a file with the shards of one replica, by its first worker.

        Args:
            engine: of this worker.
            write: writes the file, given `FsdpShard.plain_state` of each shard; returns its digest.
        """

        def collect() -> list[bytes]:
            """Send the shards of a replica to its first worker, and return them there."""
            engine.fault("collect", engine.step)
            model = self.member.model
            if self.place.replica != 0:
                return []
            found: list[bytes] = run_released(lambda: model.group.collect(codec.encode(model.plain_state())))
            return found

        def first() -> int:
            return self.place.layout.replicas[0].members[0]

        return WriteFile(lambda shards: write([codec.decode(shard) for shard in shards]), collect, first)

    def digest(self, engine: Engine, module: nn.Module) -> str:
        """Return the digest of a model's state, for all workers together."""
        shard, own = self.fabric.own_shard, dict[str, Any]()
        reshard(module)
        for name, value in state_tensors(module.state_dict()):
            sharded = isinstance(value, DTensor)
            if isinstance(value, DTensor):
                number = weighted(local_shard(value), region(value), value.shape) if holds_first(value) else 0
            else:
                number = weighted(value)
            own[name] = [str(value.dtype), [*value.shape], str(number), sharded]
        word = codec.encode([shard, own])
        shards = dict(map(codec.decode, unpack_parts(engine.run(Agreement("digest", lambda rank: word)))))
        found = {}
        for name, (dtype, shape, number, sharded) in shards[0].items():
            numbers = [int(each[name][2]) for each in shards.values()] if sharded else [int(number)]
            found[name] = dtype, list(shape), sum(numbers) % (1 << 64)
        return digest_from(found)

    def _leave(self) -> None:
        """Keep a spare's model, which takes part in nothing."""
        self.member.model.leave()
