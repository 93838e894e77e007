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

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

import msgspec
import torch
from torch import Tensor

from unicron_lightning import wire
from unicron_lightning.errors import UnicronError
from unicron_lightning.shared_memory import verified
from unicron_lightning.worker.codec import unpack_parts
from unicron_lightning.worker.communication.communicator import broadcast_bytes, gather_bytes
from unicron_lightning.worker.comparison import TaskHost
from unicron_lightning.worker.delivery import Stream, pass_streams, ways
from unicron_lightning.worker.engine import Engine, World
from unicron_lightning.worker.operations import Agreement, Indivisible
from unicron_lightning.worker.session import FitPassed
from unicron_lightning.worker.staging import StagedVersion, Staging
from unicron_lightning.worker.state_parts import DividedState, SharePart, joined, staged_parts

logger = logging.getLogger(__name__)

_ANSWER_SECONDS: Final = 10.0
_StateT = TypeVar("_StateT")


class StateDivision:
    """Divides the state of a model that each worker holds as a whole: its parts are shares of equal bytes.

    Args:
        host: has the session.
    """

    shards = 1
    """Shards of the model."""
    shard = 0
    """This worker's shard."""
    equal = True
    """Whether the workers of a shard have equal states."""

    def __init__(self, host: TaskHost) -> None:
        self._host = host

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
        engine = self._host.session.engine
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
        self._host.session.check_fit(state["fit"])

    def common(self, state: dict[str, Any]) -> bytes:
        """Return the encoded part of the state of this worker's shard that all workers need; b"" for none."""
        return b""


class MemoryHost(TaskHost, Protocol):
    """A strategy or a loop that keeps states in its agents' memory."""

    @property
    def division(self) -> StateDivision: ...


class _ValidCopy(msgspec.Struct, frozen=True):
    """A valid copy of a part: SHA-256, and number of bytes."""

    digest: str
    size: int


class _Found(msgspec.Struct):
    """A worker's shard of the model, and its valid copies of a version by the numbers of the parts."""

    shard: int
    copies: dict[int, _ValidCopy]

    @classmethod
    def encoded(cls, shard: int, own: Mapping[int, tuple[str, bytes]]) -> bytes:
        """Encode what a worker has, given digest and bytes of each part."""
        return msgspec.json.encode(
            cls(shard, {part: _ValidCopy(digest, len(data)) for part, (digest, data) in own.items()})
        )


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
        host: has session and division.

    Attributes:
        every_n_steps: steps between two versions; 0 for none.
        partners: copies of each part on other nodes.
        previous: steps at the boundary before, which a joiner receives; None before the first. With manual optimization
            there may be several steps between two boundaries.
    """

    def __init__(self, host: MemoryHost) -> None:
        self.every_n_steps = 0
        self.partners = 0
        self.previous: int | None = None
        self._host = host
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
        engine, division = self._host.session.engine, self._host.division
        control, every, step = engine.control, self.every_n_steps, engine.step
        before, self.previous = step - 1 if self.previous is None else self.previous, step
        if not every or control is None or step == 0 or step // every == before // every:
            return
        if self._staging is None:
            self._staging = Staging(control, self._host.session.fits)
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
        session = self._host.session
        later = [offer for offer in session.memory if offer.version.fit > session.fits]
        if not later or session.control is None:
            return False
        given = session.control.held(_ANSWER_SECONDS)
        for offer in later:
            own = self._own(offer, given)
            if self._host.division.refusal(offer.version) is None and self._is_there(offer, own):
                session.memory = session.memory[session.memory.index(offer) :]
                return True
        session.memory = tuple(offer for offer in session.memory if offer not in later)
        return False

    def restore(self, take: Callable[[dict[str, Any], bytes], _StateT]) -> _StateT | None:
        """Restore the newest offered version that is complete; for all founders together.

        Args:
            take: restores the state of this worker's shard, given with the part that all workers need.

        Returns:
            The result of ``take``; None if no version can be restored.

        Raises:
            FitPassed: fits before it were left out, and it is complete no more.
        """
        session, division = self._host.session, self._host.division
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
            found = session.engine.run(collected)
            if not found:
                if collected.reason:
                    self._reject(offer, collected.reason)
                continue
            assert collected.state is not None
            logger.warning("task_resumes_from_memory step=%d", step)
            restored = take(collected.state, found[1:])
            if session.engine.world.rank == 0:
                session.control.event("state_restored", tier="memory", step=step, holders=offer.holders)
            return restored
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
        views = [
            msgspec.json.decode(each, type=_Found) for each in unpack_parts(self._host.session.engine.run(operation))
        ]
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
        division, workers = self._host.division, self._host.session.engine.world.workers
        agent = self._worker.rpartition("/")[0]
        beside = [worker for worker in workers if worker.rpartition("/")[0] == agent]
        return part * division.shards // parts == division.shard or beside[part % len(beside)] == self._worker

    @property
    def _worker(self) -> str:
        """This worker's identity."""
        control = self._host.session.control
        return "" if control is None else control.worker

    def _reject(self, offer: wire.StateOffer, why: str) -> None:
        logger.error("memory_rejected step=%d reason=%s", offer.version.step, why)
        control = self._host.session.control
        if control is not None:
            control.event("memory_rejected", step=offer.version.step, reason=why[:500])


def _name(offer: wire.StateOffer) -> str:
    """Name of a version's exchanges."""
    return f"memory {offer.version.life} {offer.version.epoch} {offer.version.step}"
