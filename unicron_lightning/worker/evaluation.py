"""One pass over evaluation data: batches are distributed, and those of a dead rank redistributed.

Each rank runs its share without communication. At the end the ranks exchange the results of their batches (logged
values). The survivors repeat only a dead rank's batches, and every rank has the results of all batches in the same
order, whatever the size of the world was.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from unicron_lightning.worker.communication.communicator import gather_bytes
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.operations import pack_parts
from unicron_lightning.worker.report_sum import Report, ReportSum
from unicron_lightning.worker.rows import share


def unfinished(batches: Sequence[int], reports: ReportSum) -> list[int]:
    """The batches that no member has run so far."""
    return [number for number in batches if number not in reports.finished]


def plan_evaluation(num_batches: int, reports: ReportSum, rank: int, finished: Collection[int]) -> list[int]:
    """The batches for ``rank``: its share of those that no rank has run so far, without those in ``finished``."""
    planned = share(unfinished(range(num_batches), reports), rank, reports.world)
    return [number for number in planned if number not in finished]


class Evaluation:
    """The end of a pass.

    Args:
        todo: given the members' reports and this rank, returns the batches that this rank has yet to run, by number.
        run: runs one of them and keeps its results.
        finished: numbers that this rank reports: those of the batches that it has run so far; ``run`` adds to it.
        results: returns this rank's results as bytes, once no batch is missing.
    """

    name = "evaluation"

    def __init__(
        self,
        todo: Callable[[ReportSum, int], Iterable[int]],
        run: Callable[[int], None],
        finished: Collection[int],
        results: Callable[[], bytes],
    ) -> None:
        self._plan = todo
        self._run = run
        self._finished = finished
        self._results = results
        self._todo: Iterable[int] = ()

    def plan(self, reports: ReportSum, rank: int) -> None:
        self._todo = self._plan(reports, rank)

    def attempt(self, engine: Engine) -> bytes:
        for number in self._todo:
            engine.check()
            self._run(number)
        engine.fault("evaluated", engine.step)
        return pack_parts(gather_bytes(engine.communicator, self._results(), engine.tag(self.name)))

    def suspend(self) -> None:
        pass

    def report(self) -> Report:
        return {"finished": sorted(self._finished)}

    def adopt(self, result: bytes) -> None:
        pass
