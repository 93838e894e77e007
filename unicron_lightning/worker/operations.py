"""Operations beside the step: agreeing on bytes, the admission of joiners, evaluations."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final, Generic, NoReturn, TypeVar

from unicron_lightning.wire import PARTING
from unicron_lightning.worker.codec import pack_parts
from unicron_lightning.worker.communication.communicator import STOP, gather_bytes
from unicron_lightning.worker.delivery import LARGE, deliver
from unicron_lightning.worker.engine import JOIN, Engine, EpochChanged
from unicron_lightning.worker.rows import Report, ReportSum
from unicron_lightning.worker.state_parts import DividedState

logger = logging.getLogger(__name__)

_PARTS: Final = b"parts"


class Indivisible:
    """Base of operations that are repeated as a whole, since a failed attempt leaves nothing to keep.

    Without a `plan` of its own, all ranks do the same.
    """

    def plan(self, reports: ReportSum, rank: int) -> None:
        pass

    def suspend(self) -> None:
        pass

    def report(self) -> Report:
        return {}

    def adopt(self, result: bytes) -> None:
        pass


class Agreement(Indivisible):
    """Every rank receives every rank's payload; the result is `pack_parts` of them in rank order.

    Args:
        name: identifies this use, so that scripts on different paths are detected.
        payload: returns this rank's payload, given its rank in the current world.
    """

    def __init__(self, name: str, payload: Callable[[int], bytes]) -> None:
        self.name = name
        self._payload = payload
        self._rank = 0

    def plan(self, reports: ReportSum, rank: int) -> None:
        self._rank = rank

    def attempt(self, engine: Engine) -> bytes:
        engine.fault("agree", self.name)
        return pack_parts(gather_bytes(engine.communicator, self._payload(self._rank), engine.tag(self.name)))


def agree_to_stop(engine: Engine) -> bool:
    """Propose, where members look for a stop, that the run ends there; return whether all members propose it.

    Otherwise the next commit has this worker's vote, and all members stop after that step: `takes_stop`.
    """
    agreed = bool(engine.run(Agreement(STOP, lambda rank: b"stop")))
    engine.wants_stop = not agreed
    return agreed


def takes_stop(engine: Engine) -> bool:
    """Whether the members have agreed on a stop in the last commit; True once."""
    if not engine.stops:
        return False
    engine.wants_stop = engine.stops = False
    return True


class Join(Indivisible):
    """The admission of joiners at a step boundary: members without state receive it from those that have it.

    The operation completes when all members have the state, so a member that has left the boundary proves that no
    joiner needs it any more. Large tensors are sent from where they are, and a joiner keeps the memory that it
    receives: no rank holds the state once more beside its own. See `delivery`.

    Args:
        donate: returns this worker's state, plain data; called at most once, only if a member needs it.

    Attributes:
        received: the received state; None on workers that had it.
        admits: whether a worker has received it, as far as this one knows.
        parts: whether all members are to be restarted (an epoch of a kind in `wire.PARTING`): the same on all.
    """

    name = JOIN

    def __init__(self, donate: Callable[[], Any]) -> None:
        self.received: Any = None
        self.admits = self.parts = False
        self._donate = donate
        self._donation: DividedState | None = None
        self._delivers = False

    def plan(self, reports: ReportSum, rank: int) -> None:
        self._delivers = reports.donor is not None
        self.admits = self.admits or self._delivers

    def attempt(self, engine: Engine) -> bytes:
        communicator = engine.communicator
        engine.activity.enter("boundary")
        if self._delivers:
            self._deliver(engine)
        gather_bytes(communicator, b"", engine.tag(self.name))
        if engine.world.hold and engine.control is not None:
            logger.warning("training_held world=%d reason=fewer nodes than the minimum", engine.world.size)
            engine.activity.enter("hold")
            engine.control.wait_newer(engine.world.epoch)
            raise EpochChanged("the hold may be over")
        self.parts = engine.world.kind in PARTING
        return _PARTS if self.parts else b""

    def adopt(self, result: bytes) -> None:
        self.parts = result == _PARTS

    def _deliver(self, engine: Engine) -> None:
        """Give the state, or receive it if this worker has none."""
        lacks = not engine.has_state
        if not lacks and self._donation is None:
            state = self._donate() if self.received is None else self.received
            self._donation = DividedState.of(state, least=LARGE, paths=("",))
        engine.fault("join", engine.world.epoch)
        found = deliver(
            engine.communicator,
            engine.world.places,
            f"{self.name} state",
            self._donation,
            lacks=lacks,
            note=(engine.position, engine.step),
        )
        if found is not None:
            self.received = found.state
            engine.position, engine.step = found.note
            engine.has_state = True
            engine.report_again(self)


class Parting(Indivisible):
    """Waits for the end of the process before the task is restarted, ready to take part in writing a checkpoint.

    A failure meanwhile is handled as usual, since other members may not have reached this point.

    Args:
        tell: reports to the coordinator that this worker waits; called in each epoch.
    """

    name = "parting"

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    def attempt(self, engine: Engine) -> NoReturn:
        control, epoch = engine.control, engine.world.epoch
        assert control is not None
        self._tell()
        with control.condition:
            control.condition.wait_for(lambda: control.failed_since(epoch))
        raise EpochChanged("a failure has deferred the end")


_Unit = TypeVar("_Unit")


class Evaluation(Generic[_Unit]):
    """The end of a pass over evaluation data. Its result is `pack_parts` of each member's results.

    Each rank has run its share without communication. The survivors repeat only a dead rank's batches, and every rank
    gets the results of all batches in the same order, whatever the size of the world was. `replica.step` does the same
    for replicas of several workers.

    Args:
        todo: given the members' reports and this rank, returns the units that this rank has yet to run: batches, by
            number.
        run: runs one of them and keeps its results.
        finished: numbers that this rank reports: those of the batches that it has run so far; ``run`` adds to it.
        results: returns this rank's results as bytes, once no batch is missing.
    """

    name = "evaluation"

    def __init__(
        self,
        todo: Callable[[ReportSum, int], Iterable[_Unit]],
        run: Callable[[_Unit], None],
        finished: Collection[int],
        results: Callable[[], bytes],
    ) -> None:
        self._plan = todo
        self._run = run
        self._finished = finished
        self._results = results
        self._todo: Iterable[_Unit] = ()

    def plan(self, reports: ReportSum, rank: int) -> None:
        self._todo = self._plan(reports, rank)

    def attempt(self, engine: Engine) -> bytes:
        for unit in self._todo:
            self._run_in(engine, unit)
        engine.fault("evaluated", engine.step)
        return pack_parts(gather_bytes(engine.communicator, self._results(), engine.tag(self.name)))

    def suspend(self) -> None:
        pass

    def report(self) -> Report:
        return {"finished": sorted(self._finished)}

    def adopt(self, result: bytes) -> None:
        pass

    def _run_in(self, engine: Engine, unit: _Unit) -> None:
        engine.check()
        self._run(unit)
