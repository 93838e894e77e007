"""Division of a replica's state into the parts that agents keep in their memory, for any host of the training."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from torch import nn
from typing_extensions import override

from unicron_lightning import wire
from unicron_lightning.checkpoints.agent_memory import StateDivision
from unicron_lightning.errors import UnicronError
from unicron_lightning.replica.channels import PeerGroup, exchange
from unicron_lightning.replica.fabric import EpochPlace, run_released
from unicron_lightning.replica.member import ReplicaMember
from unicron_lightning.worker import codec
from unicron_lightning.worker.communication.communicator import gather_bytes
from unicron_lightning.worker.comparison import TaskHost
from unicron_lightning.worker.engine import Engine, World
from unicron_lightning.worker.operations import Indivisible
from unicron_lightning.worker.staging import StagedVersion, Staging
from unicron_lightning.worker.state_parts import DividedState, SharePart


class ReplicaDivision(StateDivision):
    """Divides the state of a model that is spread over the workers of a replica.

    Args:
        host: has the session.
        member: returns this worker's shard and its connections, once a run has begun.
        module: returns the model.
    """

    def __init__(
        self, host: TaskHost, member: Callable[[], ReplicaMember[Any]], module: Callable[[], nn.Module]
    ) -> None:
        super().__init__(host)
        self._member, self._module = member, module

    @property
    def shards(self) -> int:  # type: ignore[override]
        """Shards of the model."""
        return int(self._member().fabric.shape.shards)

    @property
    def shard(self) -> int:  # type: ignore[override]
        """This worker's shard."""
        return self._member().fabric.own_shard

    @property
    def place(self) -> EpochPlace:
        """This worker's place among the replicas of the present epoch."""
        place = self._member().fabric.place
        assert place is not None and place.epoch == self._host.session.engine.world.epoch
        return place

    @override
    def workers(self, world: World) -> Sequence[Sequence[int]]:
        return [[replica.members[shard] for replica in self.place.layout.replicas] for shard in range(self.shards)]

    @override
    def divide(self, state: Callable[[], dict[str, Any]]) -> DividedState:
        own = {"shard": self._member().model.plain_state(), "loops": state() if self.shard == 0 else None}
        return replace(DividedState.of(own), layout=self._layout())

    @override
    def stage(self, staging: Staging, state: Callable[[], dict[str, Any]], partners: int) -> StagedVersion | None:
        engine = self._host.session.engine
        plan = self.plan(engine.world, partners)
        if any(part.receivers for part in plan):
            copies = PartnerCopies(self, staging, state, partners)
            engine.run(copies)
            if copies.error is not None:
                raise copies.error
            return copies.staged
        if self.place.replica is None:
            return None
        return staging.stage(self.divide(state), engine.step, engine.world, plan)

    def exchange(self, staged: StagedVersion, plan: Sequence[SharePart], rank: int) -> None:
        """Send this worker's parts to their receivers, and receive those of others.

        Raises:
            CommunicatorAborted: a connection broke.
        """
        sent, received = [], []
        for part in plan:
            if part.holders[0] == rank:
                sent += [(staged.view(part.number), *self._path(to), part.number) for to in part.receivers]
            elif rank in part.receivers:
                received.append((staged.view(part.number), *self._path(part.holders[0]), part.number))
        run_released(lambda: exchange(sent, received))

    def _path(self, rank: int) -> tuple[PeerGroup, int]:
        """Return the connections to another worker of this replica or this shard, and its number there."""
        channels, places = self._member().fabric.channels, self.place.layout.replicas
        assert channels is not None
        place, shard = next((at, each.members.index(rank)) for at, each in enumerate(places) if rank in each.members)
        if place == self.place.replica:
            return channels.inner[tuple(range(self.shards))], shard
        assert shard == self.shard, "parts are sent within a replica, or within a shard"
        return channels.same_shard, place

    @override
    def refusal(self, version: wire.StateVersion) -> str | None:
        if version.layout != self._layout() or version.parts % self.shards:
            return f"it is of another model, or of another number of shards than {self.shards}"
        return None

    @override
    def check(self, state: Mapping[str, Any]) -> None:
        if state["shard"]["shard"] != self.shard:
            raise LookupError(f"found shard {state['shard']['shard']}, expected {self.shard}")
        if self.shard == 0:
            self._host.session.check_fit(state["loops"]["fit"])

    @override
    def common(self, state: dict[str, Any]) -> bytes:
        return codec.encode(state["loops"]) if self.shard == 0 else b""

    def load(self, state: dict[str, Any], step: int) -> None:
        """Load the state of this worker's shard, as it was after so many optimizer steps."""
        member = self._member()
        member.model.load_plain(state["shard"])
        member.fabric.at = step

    def describe(self) -> list[Any]:
        """Describe the whole model as plain data: the same on all workers."""
        return [(name, str(each.dtype), list(each.shape)) for name, each in self._module().named_parameters()]

    def _layout(self) -> str:
        slices = self._member().fabric.shape.slices
        words = [self.shards, self.describe()]
        if slices > 1:  # the script's own plan divides the parameters within a lane
            words += [slices, [str(getattr(each, "placements", "")) for each in self._module().parameters()]]
        return hashlib.sha256(msgspec.json.encode(words)).hexdigest()


class PartnerCopies(Indivisible):
    """The operation that stages a version of which workers send parts to each other.

    A worker that cannot stage takes part all the same, and nothing is sent then.

    Args:
        division: of the model.
        staging: this worker's.
        state: returns the state of the loops.
        partners: further copies of each part.

    Attributes:
        staged: this worker's parts, after the operation.
        error: the reason why there are none.
    """

    name = "memory_checkpoint"

    def __init__(
        self, division: ReplicaDivision, staging: Staging, state: Callable[[], dict[str, Any]], partners: int
    ) -> None:
        self.staged: StagedVersion | None = None
        self.error: OSError | MemoryError | UnicronError | None = None
        self._division = division
        self._staging = staging
        self._state = state
        self._partners = partners

    def attempt(self, engine: Engine) -> bytes:
        self.staged, self.error = None, None
        world, rank = engine.world, engine.world.rank
        plan = self._division.plan(world, self._partners)
        divided, self.error = self._divided(rank, plan)
        sizes = self._sizes(divided, rank, plan)
        said = gather_bytes(engine.communicator, msgspec.json.encode(sizes), engine.tag(self.name))
        known: dict[int, int] = {}
        for each in said:
            known.update(msgspec.json.decode(each, type=dict[int, int]))
        incoming = {part.number: known.get(part.number, 0) for part in plan if rank in part.receivers}
        staged = None
        try:
            if divided is not None:
                staged = self._staging.stage(divided, engine.step, world, plan, incoming)
        except (OSError, MemoryError) as error:
            self.error = error
        failed = b"" if self.error is None else b"failed"
        if any(gather_bytes(engine.communicator, failed, engine.tag(f"{self.name} ready"))):
            self.error = self.error or OSError("another worker could not stage its part")
            return b""
        engine.fault("partner_copies", engine.step)
        if staged is not None:
            self._division.exchange(staged, plan, rank)
        self.staged = staged
        return b""

    def _divided(
        self, rank: int, plan: Sequence[SharePart]
    ) -> tuple[DividedState | None, OSError | MemoryError | UnicronError | None]:
        """Return this worker's state, if it has a part, or the reason why it has none."""
        try:
            return (self._division.divide(self._state) if any(rank in part.holders for part in plan) else None), None
        except UnicronError as error:
            return None, error

    def _sizes(self, divided: DividedState | None, rank: int, plan: Sequence[SharePart]) -> dict[int, int]:
        """Return the bytes of each part that this worker sends."""
        if divided is None:
            return {}
        own = [part for part in plan if part.holders[0] == rank and part.receivers]
        return {part.number: divided.size(*part.share) for part in own}
