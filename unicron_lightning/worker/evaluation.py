"""One pass over evaluation data: batches are distributed, and those of a dead rank redistributed.

Each rank runs its share without communication. At the end the ranks exchange the results of their batches (logged
values). The survivors repeat only a dead rank's batches, and every rank has the results of all batches in the same
order, whatever the size of the world was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from unicron_lightning.worker.communication.communicator import gather_bytes
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.ledger import share
from unicron_lightning.worker.operations import pack_parts
from unicron_lightning.worker.report_sum import Report, ReportSum


def unfinished(batches: Sequence[int], reports: ReportSum) -> list[int]:
    """The batches that no member has run so far."""
    return [number for number in batches if number not in reports.finished]


def plan_evaluation(num_batches: int, reports: ReportSum, rank: int) -> list[int]:
    """The batches for ``rank``: its share of those that no rank has run so far."""
    return share(unfinished(range(num_batches), reports), rank, reports.world)


class Evaluation:
    """The end of a pass.

    Args:
        num_batches: of the whole pass.
        run: runs one batch, by number, and keeps its results.
        finished: numbers of the batches that this rank has run so far; ``run`` adds to it.
        results: returns this rank's results as bytes, once no batch is missing.
    """

    name = "evaluation"

    def __init__(
        self, num_batches: int, run: Callable[[int], None], finished: set[int], results: Callable[[], bytes]
    ) -> None:
        self._num_batches = num_batches
        self._run = run
        self._finished = finished
        self._results = results
        self._todo: list[int] = []

    def plan(self, reports: ReportSum, rank: int) -> None:
        planned = plan_evaluation(self._num_batches, reports, rank)
        self._todo = [number for number in planned if number not in self._finished]

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
