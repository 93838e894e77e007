"""One pass over evaluation data: batches are distributed, and those of a dead rank redistributed.

Each rank runs its share without communication. At the end the ranks exchange the results of their batches (logged
values). The survivors repeat only a dead rank's batches, and every rank has the results of all batches in the same
order, whatever the size of the world was. `replica.evaluation` does the same for replicas of several workers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Generic, TypeVar

from unicron_lightning.worker.communication.communicator import gather_bytes
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.operations import pack_parts
from unicron_lightning.worker.report_sum import Report, ReportSum

_Unit = TypeVar("_Unit")


class Evaluation(Generic[_Unit]):
    """The end of a pass. Its result is `pack_parts` of each member's results.

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
