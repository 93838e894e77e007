"""States of a task in its agents' memory: staged at step boundaries, and restored in a new life.

Staging never fails a step: an error is a warning and an event. At a restore each worker checks the copies in its own
agent's memory, and the workers give each other, one by one, the parts that some of them lack. A version of which a part
is missing or is not as it was staged is left, for the next one that the coordinator offers, or a checkpoint on disk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import lightning.pytorch as pl
import msgspec

from unicron_lightning import wire
from unicron_lightning.errors import UnicronError
from unicron_lightning.shared_memory import verified
from unicron_lightning.strategies.session import FitPassed
from unicron_lightning.worker.operations import Agreement, unpack_parts
from unicron_lightning.worker.staging import Staging

if TYPE_CHECKING:
    from unicron_lightning.strategies.fault_tolerant import FaultTolerantStrategy

logger = logging.getLogger(__name__)

_ANSWER_SECONDS: Final = 10.0


class _Found(msgspec.Struct):
    """A worker's shard of the model, and its valid copies of a version."""

    worker: str
    shard: int
    digests: dict[int, str] = {}


class _Checked(msgspec.Struct):
    """Whether a worker has its shard's state, and whether that includes what all workers need."""

    worker: str
    complete: bool
    gives: bool


_View = TypeVar("_View", _Found, _Checked)


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
            if self._strategy.parallelism.division.refusal(offer.version) is None:
                _, sources = self._sources(f"{_name(offer)} later", offer, own)
                if None not in sources:
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
            parts = self._collect(offer, given)
            if parts is None:
                continue
            state = self._checked(offer, parts)
            del parts
            common = self._agreed(offer, state)
            if state is None or common is None:
                continue
            logger.warning("task_resumes_from_memory step=%d", step)
            loops = division.restore(trainer, state, common)
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

    def _checked(self, offer: wire.StateOffer, parts: Sequence[bytes]) -> dict[str, Any] | None:
        """Return the state of this worker's shard; None if it is not as it has to be."""
        division = self._strategy.parallelism.division
        try:
            state = division.joined(parts)
            division.check(state)
        except (ValueError, LookupError, FitPassed) as error:
            self._reject(offer, str(error))
            return None
        return state

    def _agreed(self, offer: wire.StateOffer, state: dict[str, Any] | None) -> bytes | None:
        """Return the encoded part of the state that all workers need; None if a worker lacks its own."""
        division = self._strategy.parallelism.division
        common = b"" if state is None else division.common(state)
        own = _Checked(worker=self._worker, complete=state is not None, gives=bool(common))
        while True:
            views = self._views(f"{_name(offer)} checked", own, _Checked)
            if not all(view.complete for view in views):
                return None
            giver = next((view.worker for view in views if view.gives), None)
            if giver is None:
                return b""
            found = self._given(f"{_name(offer)} common", common if giver == self._worker else b"")
            if found is not None:  # otherwise that worker has died meanwhile
                return found

    def _collect(self, offer: wire.StateOffer, given: wire.StateGiven | None) -> list[bytes] | None:
        """Return all parts of this worker's shard, in order; None, on all ranks, if some part is nowhere valid."""
        division, name = self._strategy.parallelism.division, _name(offer)
        own = self._own(offer, given)
        pieces = offer.version.parts // division.shards
        needed = range(division.shard * pieces, (division.shard + 1) * pieces)
        parts = {part: data for part, (_, data) in own.items() if part in needed}
        while True:
            views, sources = self._sources(name, offer, own)
            if None in sources:
                if self._strategy.engine.world.rank == 0:
                    missing = [part for part, source in enumerate(sources) if source is None]
                    self._reject(offer, f"no worker has a valid copy of the parts {missing}")
                return None
            for part, source in enumerate(sources):
                known = {view.digests.get(part) for view in views if view.shard == part // pieces}
                if len(known) > 1 or None in known:
                    data = self._given(f"{name} part {part}", own[part][1] if source == self._worker else b"")
                    if data is not None and part in needed:
                        parts[part] = data
            if self._all(f"{name} received", len(parts) == pieces):  # otherwise a worker has died meanwhile
                return [parts[part] for part in needed]

    def _sources(
        self, name: str, offer: wire.StateOffer, own: dict[int, tuple[str, bytes]]
    ) -> tuple[list[_Found], list[str | None]]:
        """Return the copies of all workers, and for each part a worker that has a valid one."""
        digests = {part: digest for part, (digest, _) in own.items()}
        shard = self._strategy.parallelism.division.shard
        views = self._views(name, _Found(worker=self._worker, shard=shard, digests=digests), _Found)
        parts = range(offer.version.parts)
        return views, [next((view.worker for view in views if part in view.digests), None) for part in parts]

    def _views(self, name: str, own: _View, kind: type[_View]) -> list[_View]:
        """Return the descriptions of all workers, in rank order."""
        said = self._strategy.engine.run(Agreement(name, lambda rank: msgspec.json.encode(own)))
        return [msgspec.json.decode(each, type=kind) for each in unpack_parts(said)]

    def _all(self, name: str, value: bool) -> bool:
        """Whether a value is true on all workers."""
        said = self._strategy.engine.run(Agreement(name, lambda rank: b"yes" if value else b"no"))
        return all(each == b"yes" for each in unpack_parts(said))

    def _given(self, name: str, data: bytes) -> bytes | None:
        """Return the bytes that one of the workers gives to all; None if it has died."""
        said = self._strategy.engine.run(Agreement(name, lambda rank: data))
        return next((each for each in unpack_parts(said) if each), None)

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
