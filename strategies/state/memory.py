"""States of a task in its agents' memory: staged at step boundaries, and restored in a new life.

Staging never fails a step: an error is a warning and an event. At a restore each worker checks the copies in its own
agent's memory, and the workers give each other the parts that only some of them have. A version of which a part is
missing or is not as it was staged is left, for the next one that the coordinator offers, or a checkpoint on disk.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import lightning.pytorch as pl
import msgspec

from unicron_lightning import wire
from unicron_lightning.errors import ConfigError, UnicronError
from unicron_lightning.shared_memory import verified
from unicron_lightning.strategies.state import join_state
from unicron_lightning.worker.operations import Agreement, pack_parts, unpack_parts
from unicron_lightning.worker.staging import Staging
from unicron_lightning.worker.state_parts import DividedState, joined

if TYPE_CHECKING:
    from unicron_lightning.strategies.fault_tolerant import FaultTolerantStrategy

logger = logging.getLogger(__name__)

_ANSWER_SECONDS: Final = 10.0


class _Found(msgspec.Struct):
    """A worker's valid copies of a version."""

    worker: str
    digests: dict[int, str] = {}


class StateMemory:
    """This worker's side of the states in its agent's memory.

    Args:
        strategy: provides engine, session and state.

    Attributes:
        every_n_steps: steps between two versions; 0 for none.
        partners: copies of each part on other nodes.
    """

    def __init__(self, strategy: FaultTolerantStrategy) -> None:
        self.every_n_steps = 0
        self.partners = 0
        self._strategy = strategy
        self._staging: Staging | None = None
        self._failing = False

    def use(self, every_n_steps: int, partners: int) -> None:
        """Stage a version every so many steps.

        Raises:
            ConfigError: the strategy divides the model between workers.
        """
        if not self._strategy.parallelism.whole:
            raise ConfigError(
                f'MemoryCheckpoint needs Trainer(strategy="unicron"), found strategy={self._strategy.strategy_name!r}'
            )
        self.every_n_steps, self.partners = every_n_steps, partners

    def boundary(self, state: Any) -> None:
        """Stage the state at a step boundary, if a version is due.

        Args:
            state: returns this worker's state for a joiner.
        """
        engine = self._strategy.engine
        control = engine.control
        if not self.every_n_steps or control is None or engine.step == 0 or engine.step % self.every_n_steps:
            return
        if self._staging is None:
            self._staging = Staging(control, self.partners)
        try:
            with engine.activity.during("checkpoint"):
                self._staging.stage(DividedState.of(state()), engine.step, engine.world)
            self._failing = False
        except (OSError, MemoryError, ValueError, RuntimeError, UnicronError) as error:
            logger.warning("memory_checkpoint_failed step=%d error=%s", engine.step, error)
            if not self._failing:
                control.event("memory_checkpoint_failed", step=engine.step, error=str(error)[:500])
            self._failing = True

    def restore(self, trainer: pl.Trainer) -> dict[str, Any] | None:
        """Restore the newest offered version that is complete; for all founders together.

        Returns:
            Its state, for `join_state.arrive`; None if no version can be restored.
        """
        strategy, session = self._strategy, self._strategy.session
        offers, session.memory = session.memory, ()
        if not offers or session.control is None:
            return None
        given = session.control.held(_ANSWER_SECONDS)
        for offer in offers:
            step = offer.version.step
            parts = self._collect(offer, given)
            if parts is None:
                continue
            try:
                state: dict[str, Any] = joined(parts)
                session.check_fit(state["fit"])
            except (ValueError, LookupError, ConfigError) as error:
                self._reject(offer, str(error))
                continue
            logger.warning("task_resumes_from_memory step=%d", step)
            join_state.resume_from(trainer, state)
            if strategy.engine.world.rank == 0:
                session.control.event("state_restored", tier="memory", step=step, holders=offer.holders)
            return state
        return None

    def close(self) -> None:
        """End a run."""
        if self._staging is not None:
            self._staging.close()
            self._staging = None
        self.every_n_steps = 0

    # ---- restoring

    def _collect(self, offer: wire.StateOffer, given: wire.StateGiven | None) -> list[bytes] | None:
        """Return all parts of a version, in order, the same on all ranks; None if some part is nowhere valid."""
        engine, number = self._strategy.engine, offer.version.parts
        own = self._own(offer, given)
        found = _Found(
            worker="" if engine.control is None else engine.control.worker,
            digests={part: digest for part, (digest, _) in own.items()},
        )
        while True:
            name = f"memory {offer.version.life} {offer.version.epoch} {offer.version.step}"
            said = engine.run(Agreement(name, lambda rank: msgspec.json.encode(found)))
            views = [msgspec.json.decode(each, type=_Found) for each in unpack_parts(said)]
            sources = [next((view for view in views if part in view.digests), None) for part in range(number)]
            if None in sources:
                if engine.world.rank == 0:
                    missing = [part for part, source in enumerate(sources) if source is None]
                    self._reject(offer, f"no worker has a valid copy of the parts {missing}")
                return None
            shared = {part for part in range(number) if len({view.digests.get(part) for view in views}) == 1}
            mine = [p for p, s in enumerate(sources) if s is not None and s.worker == found.worker and p not in shared]
            received = self._exchange(f"{name} parts", mine, own)
            parts = {**received, **{part: own[part][1] for part in shared}}
            if len(parts) == number:  # otherwise the worker that had a part has died meanwhile
                return [parts[part] for part in range(number)]

    def _exchange(self, name: str, mine: Sequence[int], own: Mapping[int, tuple[str, bytes]]) -> dict[int, bytes]:
        """Give some parts to all ranks; return those that ranks have given."""
        payload = pack_parts([msgspec.json.encode(list(mine)), *(own[part][1] for part in mine)]) if mine else b""
        received: dict[int, bytes] = {}
        for each in unpack_parts(self._strategy.engine.run(Agreement(name, lambda rank: payload))):
            if each:
                head, *parts = unpack_parts(each)
                received.update(zip(msgspec.json.decode(head, type=list[int]), parts, strict=True))
        return received

    def _own(self, offer: wire.StateOffer, given: wire.StateGiven | None) -> dict[int, tuple[str, bytes]]:
        """Return digest and bytes of each valid part in this worker's agent's memory."""
        found = {}
        for each in () if given is None else given.copies:
            copy = each.copy
            known = copy.version == offer.version and copy.part < len(offer.digests)
            if known and copy.digest in offer.digests[copy.part]:
                assert given is not None
                try:
                    found[copy.part] = copy.digest, verified(given.pid, each)
                except OSError as error:
                    self._reject(offer, str(error))
        return found

    def _reject(self, offer: wire.StateOffer, why: str) -> None:
        logger.error("memory_rejected step=%d reason=%s", offer.version.step, why)
        control = self._strategy.engine.control
        if control is not None:
            control.event("memory_rejected", step=offer.version.step, reason=why[:500])
