"""Some batches of a validation pass, run by a world of replicas through failures.

1. **Calls.** Each replica runs its share forward, batches of equal size in one call. One of its workers keeps the
   results, call by call; in rows of several batches, each worker those of its own batches.
2. **Exchange.** All members, including spares, receive the results of every batch.

After a failure the batches without results on any present worker are redistributed. A worker that leaves before the
end of the exchange cuts its replica's connections, since the first stage finishes while the last one still computes. No
worker thus waits for one that has left, and a complete replica may have to repeat its share. Nothing is counted twice,
as each batch's results are taken from one worker; no parameter or gradient is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from typing_extensions import override

from unicron_lightning.replica.fabric import EpochPlace, ReplicaFabric, run_released
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.evaluation import Evaluation
from unicron_lightning.worker.report_sum import ReportSum
from unicron_lightning.worker.rows import plan_rows


class ReplicaEvaluation(Evaluation[Sequence[int]]):
    """The operation, whose units are calls of some rows.

    Args:
        batches: all of them, by number.
        size: samples of a row's batches, by number of the row.
        fabric: provides this worker's place, and receives its progress.
        device: of the model.
        call: runs some rows of one size forward, with the partners; arguments: their numbers, and the size.
        results: returns the results of some rows, by their numbers, as bytes.
        tells: whether this worker reports its replica's results, or those of its own batches.
        width: batches of a row; if there are several, each worker runs and reports that of its shard.
    """

    def __init__(
        self,
        batches: Iterable[int],
        size: Callable[[int], int],
        fabric: ReplicaFabric[Any],
        device: torch.device,
        call: Callable[[Sequence[int], int], None],
        results: Callable[[Collection[int]], bytes],
        *,
        tells: bool,
        width: int = 1,
    ) -> None:
        finished: set[int] = set()

        def run(rows: Sequence[int]) -> None:
            fabric.phase = "calls"
            run_released(partial(call, rows, size(rows[0])))
            fabric.arrive(device)
            if tells:
                finished.update(rows)

        super().__init__(self._calls, run, finished, lambda: results(sorted(finished)))
        self._batches = batches
        self._size = size
        self._fabric = fabric
        self._width = width

    @property
    def _place(self) -> EpochPlace:
        assert self._fabric.place is not None
        return self._fabric.place

    @override
    def attempt(self, engine: Engine) -> bytes:
        result = super().attempt(engine)
        self._fabric.phase = "idle"
        return result

    @override
    def adopt(self, result: bytes) -> None:
        self._fabric.phase = "idle"

    @override
    def _run_in(self, engine: Engine, unit: Sequence[int]) -> None:
        self._run(unit)  # without a check: partners that have begun a call wait for this worker

    def _calls(self, reports: ReportSum, rank: int) -> list[list[int]]:
        layout, width = self._place.layout, self._width
        finished = reports.finished if width == 1 else batches_of(reports, layout.shards, width)
        plan = plan_rows(self._batches, finished, self._place.replica, len(layout.replicas), width=width)
        return [list(rows) for _, rows in groupby(plan.rows, self._size)]


def batches_of(reports: ReportSum, shards: Sequence[int], width: int) -> set[int]:
    """Return the batches that present workers have finished, from reports of the rows in which each has run its own.

    Args:
        reports: of the members.
        shards: of the members, by rank.
        width: batches of a row, one for each shard.
    """
    of_shards = zip(reports.members, shards, strict=True)
    return {row * width + shard for report, shard in of_shards if report is not None for row in report["finished"]}
