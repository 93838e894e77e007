"""States of a task in its agents' memory: staged at step boundaries, and restored in a new life.

Staging never fails a step: an error is a warning and an event. At a restore each worker checks the copies in its own
agent's memory, and the workers give each other the parts that some of them lack. A version of which a part is missing
or is not as it was staged is left, for the next one that the coordinator offers, or a checkpoint on disk.

A model that each worker holds as a whole is divided into shares of equal bytes. Of replicas with several workers, those
of a shard stage a share each, and the first shard has the loops' state. Copies for other nodes come from the workers of
the same shard there. If there are none, as in a single replica, a worker sends its part to one of another shard, over
the connections of their replica.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import lightning.pytorch as pl
import msgspec
import torch
from torch import Tensor
from typing_extensions import override

from unicron_lightning import wire
from unicron_lightning.errors import UnicronError
from unicron_lightning.replica.channels import PeerGroup, exchange
from unicron_lightning.replica.fabric import EpochPlace, run_released
from unicron_lightning.replica.member import ReplicaMember
from unicron_lightning.shared_memory import verified
from unicron_lightning.strategies.state import join_state
from unicron_lightning.worker import codec
from unicron_lightning.worker.codec import unpack_parts
from unicron_lightning.worker.communication.communicator import broadcast_bytes, gather_bytes
from unicron_lightning.worker.delivery import Stream, pass_streams, ways
from unicron_lightning.worker.engine import Engine, World
from unicron_lightning.worker.operations import Agreement, Indivisible
from unicron_lightning.worker.session import FitPassed
from unicron_lightning.worker.staging import StagedVersion, Staging
from unicron_lightning.worker.state_parts import DividedState, SharePart, joined, staged_parts

if TYPE_CHECKING:
    from unicron_lightning.strategies.fault_tolerant import FaultTolerantStrategy

logger = logging.getLogger(__name__)

_ANSWER_SECONDS: Final = 10.0


class StateDivision:
    """Divides the state of a model that each worker holds as a whole: its parts are shares of equal bytes.

    Args:
        strategy: provides engine, session and state.
    """

    shards = 1
    """Shards of the model."""
    shard = 0
    """This worker's shard."""
    equal = True
    """Whether the workers of a shard have equal states."""

    def __init__(self, strategy: FaultTolerantStrategy) -> None:
        self.strategy = strategy

    def workers(self, world: World) -> Sequence[Sequence[int]]:
        """Return the ranks of the workers of each shard, in the order of replicas."""
        return [range(world.size)]

    def plan(self, world: World, partners: int) -> tuple[SharePart, ...]:
        """Return all parts of a version, in order."""
        return staged_parts(self.workers(world), world.places, partners, equal=self.equal)

    def divide(self, state: Callable[[], dict[str, Any]]) -> DividedState:
        """Return this worker's state, given a function that returns that of a joiner.

        Raises:
            NotPlainData: it holds objects.
        """
        return DividedState.of(state())

    def stage(self, staging: Staging, state: Callable[[], dict[str, Any]], partners: int) -> StagedVersion | None:
        """Copy this worker's parts at a step boundary, together with all other members.

        Returns:
            Copies for the agent; None if another worker's failure has prevented them.

        Raises:
            OSError, MemoryError: there is not enough memory.
            NotPlainData: the state holds objects.
        """
        engine = self.strategy.engine
        plan = self.plan(engine.world, partners)
        return staging.stage(self.divide(state), engine.step, engine.world, plan)

    def joined(self, parts: Sequence[bytes]) -> dict[str, Any]:
        """Return the state of this worker's shard, given its parts in order.

        Raises:
            ValueError: the bytes are not those of a state's parts.
        """
        state: dict[str, Any] = joined(parts)
        return state

    def refusal(self, version: wire.StateVersion) -> str | None:
        """Return the reason why a version does not fit this task; the same on all members."""
        return None

    def check(self, state: Mapping[str, Any]) -> None:
        """Check the state of this worker's shard before it is restored.

        Raises:
            FitPassed: it belongs to another ``fit`` of the script.
            LookupError: it is none.
        """
        self.strategy.session.check_fit(state["fit"])

    def common(self, state: dict[str, Any]) -> bytes:
        """Return the encoded part of the state of this worker's shard that all workers need; b"" for none."""
        return b""

    def restore(self, trainer: pl.Trainer, state: dict[str, Any], common: bytes) -> dict[str, Any]:
        """Restore a checked state; return that of the loops, for `join_state.arrive`."""
        return join_state.resume_from(trainer, state)


class ReplicaDivision(StateDivision):
    """Divides the state of a model that is spread over the workers of a replica.

    Args:
        strategy: provides engine, session and state.
        member: returns this worker's shard and its connections, once a run has begun.
    """

    def __init__(self, strategy: FaultTolerantStrategy, member: Callable[[], ReplicaMember[Any, Any]]) -> None:
        super().__init__(strategy)
        self._member = member

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
        assert place is not None and place.epoch == self.strategy.engine.world.epoch
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
        engine = self.strategy.engine
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
            self.strategy.session.check_fit(state["loops"]["fit"])

    @override
    def common(self, state: dict[str, Any]) -> bytes:
        return codec.encode(state["loops"]) if self.shard == 0 else b""

    @override
    def restore(self, trainer: pl.Trainer, state: dict[str, Any], common: bytes) -> dict[str, Any]:
        loops = join_state.resume_from(trainer, codec.decode(common))
        self.load(state, int(loops["checkpoint"]["global_step"]))
        return loops

    def load(self, state: dict[str, Any], step: int) -> None:
        """Load the state of this worker's shard, as it was after so many optimizer steps."""
        member = self._member()
        member.model.load_plain(state["shard"])
        member.fabric.at = step

    def describe(self) -> list[Any]:
        """Describe the whole model as plain data: the same on all workers."""
        module = self.strategy.module
        return [(name, str(each.dtype), list(each.shape)) for name, each in module.named_parameters()]

    def _layout(self) -> str:
        return hashlib.sha256(msgspec.json.encode([self.shards, self.describe()])).hexdigest()


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


class _Copy(msgspec.Struct, frozen=True):
    """A valid copy of a part: SHA-256, and number of bytes."""

    digest: str
    size: int


class _Found(msgspec.Struct):
    """A worker's shard of the model, and its valid copies of a version by the numbers of the parts."""

    shard: int
    copies: dict[int, _Copy]

    @classmethod
    def encoded(cls, shard: int, own: Mapping[int, tuple[str, bytes]]) -> bytes:
        """Encode what a worker has, given digest and bytes of each part."""
        return msgspec.json.encode(cls(shard, {part: _Copy(digest, len(data)) for part, (digest, data) in own.items()}))


def _missing(views: Sequence[_Found], parts: int) -> list[int]:
    """Return the parts without a valid copy."""
    return [part for part in range(parts) if not any(part in view.copies for view in views)]


class CollectState(Indivisible):
    """The operation that gives each worker the state of its shard from a version in the agents' memory.

    The result is empty if a part is nowhere valid, or the state of a shard is not as it has to be. Otherwise a byte
    precedes the encoded part of the state that all workers need.

    Args:
        division: of the model.
        offer: the version.
        own: digest and bytes of each valid part in the memory of this worker's agent.

    Attributes:
        state: of this worker's shard, after the operation.
        reason: of a refusal by this worker.
    """

    def __init__(self, division: StateDivision, offer: wire.StateOffer, own: Mapping[int, tuple[str, bytes]]) -> None:
        self.name = _name(offer)
        self.state: dict[str, Any] | None = None
        self.reason = ""
        self._division = division
        self._parts = offer.version.parts
        self._own = own

    def attempt(self, engine: Engine) -> bytes:
        division, communicator, rank = self._division, engine.communicator, engine.world.rank
        self.state, self.reason = None, ""
        parts = self._collect(engine)
        if parts is None:
            return b""
        try:
            state = division.joined(parts)
            division.check(state)
            self.state = state
        except (ValueError, LookupError, FitPassed) as error:
            self.reason = str(error)
        common = b"" if self.state is None else division.common(self.state)
        view = b"" if self.state is None else b"gives" if common else b"has"
        views = gather_bytes(communicator, view, engine.tag(f"{self.name} checked"))
        if not all(views):
            return b""
        giver = next((number for number, each in enumerate(views) if each == b"gives"), None)
        return b"+" + (
            b"" if giver is None else broadcast_bytes(communicator, common if rank == giver else None, giver)
        )

    def _collect(self, engine: Engine) -> list[bytes] | None:
        """Return all parts of this worker's shard, in order; None, on all ranks, if some part is nowhere valid."""
        communicator, shard = engine.communicator, self._division.shard
        pieces = self._parts // self._division.shards
        needed = range(shard * pieces, (shard + 1) * pieces)
        own = _Found.encoded(shard, self._own)
        views = [
            msgspec.json.decode(each, type=_Found) for each in gather_bytes(communicator, own, engine.tag(self.name))
        ]
        if missing := _missing(views, self._parts):
            self.reason = f"no worker has a valid copy of the parts {missing}" if communicator.rank == 0 else ""
            return None
        received: dict[int, Tensor] = {}
        streams = [self._stream(part, views, part // pieces, engine.world, received) for part in range(self._parts)]
        pass_streams(communicator, [stream for stream in streams if stream.ways])
        return [received[part].numpy().tobytes() if part in received else self._own[part][1] for part in needed]

    def _stream(
        self, part: int, views: Sequence[_Found], shard: int, world: World, received: dict[int, Tensor]
    ) -> Stream:
        """Return the way of a part from the workers with the first worker's copy to those of its shard without it."""
        copy = next(view.copies[part] for view in views if part in view.copies)
        givers = [rank for rank, view in enumerate(views) if view.copies.get(part) == copy]
        lacking = [rank for rank, view in enumerate(views) if view.shard == shard and rank not in givers]
        memory: list[Tensor] = []
        if world.rank in lacking:
            memory = [received.setdefault(part, torch.empty(copy.size, dtype=torch.uint8))]
        elif lacking and world.rank in givers:
            memory = [torch.frombuffer(bytearray(self._own[part][1]), dtype=torch.uint8)]
        return Stream(ways(givers, lacking, world.places), copy.size, memory)


class StateMemory:
    """This worker's side of the states in its agent's memory.

    Args:
        strategy: provides engine, session and state.

    Attributes:
        every_n_steps: steps between two versions; 0 for none.
        partners: copies of each part on other nodes.
        previous: steps at the boundary before, which a joiner receives; None before the first. With manual optimization
            there may be several steps between two boundaries.
    """

    def __init__(self, strategy: FaultTolerantStrategy) -> None:
        self.every_n_steps = 0
        self.partners = 0
        self.previous: int | None = None
        self._strategy = strategy
        self._staging: Staging | None = None
        self._failing = False

    def use(self, every_n_steps: int, partners: int) -> None:
        """Stage a version every so many steps."""
        self.every_n_steps, self.partners = every_n_steps, partners

    def boundary(self, state: Callable[[], dict[str, Any]]) -> None:
        """Stage the state at a step boundary, if a version is due.

        Args:
            state: returns this worker's state for a joiner.
        """
        engine, division = self._strategy.engine, self._strategy.parallelism.division
        control, every, step = engine.control, self.every_n_steps, engine.step
        before, self.previous = step - 1 if self.previous is None else self.previous, step
        if not every or control is None or step == 0 or step // every == before // every:
            return
        if self._staging is None:
            self._staging = Staging(control, self._strategy.session.fits)
        try:
            with engine.activity.during("checkpoint"):
                staged = division.stage(self._staging, state, self.partners)
                if staged is not None:
                    self._staging.hand_over(staged)
            self._failing = False
        except (OSError, MemoryError, ValueError, RuntimeError, UnicronError) as error:
            logger.warning("memory_checkpoint_failed step=%d error=%s", engine.step, error)
            if not self._failing:
                control.event("memory_checkpoint_failed", step=engine.step, error=str(error)[:500])
            self._failing = True

    def is_past(self) -> bool:
        """Whether a complete version of a later ``fit`` is offered; for all founders together. Newer ones are left."""
        session = self._strategy.session
        later = [offer for offer in session.memory if offer.version.fit > session.fits]
        if not later or session.control is None:
            return False
        given = session.control.held(_ANSWER_SECONDS)
        for offer in later:
            own = self._own(offer, given)
            if self._strategy.parallelism.division.refusal(offer.version) is None and self._is_there(offer, own):
                session.memory = session.memory[session.memory.index(offer) :]
                return True
        session.memory = tuple(offer for offer in session.memory if offer not in later)
        return False

    def restore(self, trainer: pl.Trainer) -> dict[str, Any] | None:
        """Restore the newest offered version that is complete; for all founders together.

        Returns:
            Its state, for `join_state.arrive`; None if no version can be restored.

        Raises:
            FitPassed: fits before it were left out, and it is complete no more.
        """
        strategy, session, division = self._strategy, self._strategy.session, self._strategy.parallelism.division
        offers = [offer for offer in session.memory if offer.version.fit == session.fits]
        session.memory = tuple(offer for offer in session.memory if offer.version.fit > session.fits)
        if not offers or session.control is None:
            return None
        given = session.control.held(_ANSWER_SECONDS)
        for offer in offers:
            step = offer.version.step
            if (reason := division.refusal(offer.version)) is not None:
                self._reject(offer, reason)
                continue
            collected = CollectState(division, offer, self._own(offer, given))
            found = strategy.engine.run(collected)
            if not found:
                if collected.reason:
                    self._reject(offer, collected.reason)
                continue
            assert collected.state is not None
            logger.warning("task_resumes_from_memory step=%d", step)
            loops = division.restore(trainer, collected.state, found[1:])
            if strategy.engine.world.rank == 0:
                session.control.event("state_restored", tier="memory", step=step, holders=offer.holders)
            return loops
        if session.left_out and not session.resume:
            raise FitPassed(f"fit number {session.fits}: its version in the agents' memory is complete no more")
        return None

    def close(self) -> None:
        """End a run."""
        if self._staging is not None:
            self._staging.close()
            self._staging = None
        self.every_n_steps, self.previous = 0, None

    # ---- restoring

    def _is_there(self, offer: wire.StateOffer, own: Mapping[int, tuple[str, bytes]]) -> bool:
        """Whether some worker has a valid copy of each part of a version; the same on all."""
        operation = Agreement(f"{_name(offer)} later", lambda rank: _Found.encoded(0, own))
        views = [msgspec.json.decode(each, type=_Found) for each in unpack_parts(self._strategy.engine.run(operation))]
        return not _missing(views, offer.version.parts)

    def _own(self, offer: wire.StateOffer, given: wire.StateGiven | None) -> dict[int, tuple[str, bytes]]:
        """Return digest and bytes of each valid part in this worker's agent's memory.

        Parts of other shards are read by one of the agent's workers only.
        """
        found = {}
        for each in () if given is None else given.copies:
            copy = each.copy
            known = copy.version == offer.version and copy.part < len(offer.digests)
            if known and copy.digest in offer.digests[copy.part] and self._reads(copy.part, offer.version.parts):
                assert given is not None
                try:
                    found[copy.part] = copy.digest, verified(given.pid, each)
                except OSError as error:
                    self._reject(offer, str(error))
        return found

    def _reads(self, part: int, parts: int) -> bool:
        """Whether this worker reads a part that its agent has."""
        division, workers = self._strategy.parallelism.division, self._strategy.engine.world.workers
        agent = self._worker.rpartition("/")[0]
        beside = [worker for worker in workers if worker.rpartition("/")[0] == agent]
        return part * division.shards // parts == division.shard or beside[part % len(beside)] == self._worker

    @property
    def _worker(self) -> str:
        """This worker's identity."""
        control = self._strategy.engine.control
        return "" if control is None else control.worker

    def _reject(self, offer: wire.StateOffer, why: str) -> None:
        logger.error("memory_rejected step=%d reason=%s", offer.version.step, why)
        control = self._strategy.engine.control
        if control is not None:
            control.event("memory_rejected", step=offer.version.step, reason=why[:500])


def _name(offer: wire.StateOffer) -> str:
    """Name of a version's exchanges."""
    return f"memory {offer.version.life} {offer.version.epoch} {offer.version.step}"
