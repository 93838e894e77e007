"""Some batches of a validation pass, run by a world of replicas through failures.

1. **Calls.** Each replica runs its share forward, batches of equal size in one call. One of its workers keeps the
   results, call by call.
2. **Exchange.** All members, including spares, receive the results of every batch.

After a failure the batches without results on any present worker are redistributed. A worker that leaves before the
end of the exchange cuts its replica's connections, since the first stage finishes while the last one still computes. No
worker thus waits for one that has left, and a complete replica may have to repeat its share. Nothing is counted twice,
as each batch's results are taken from one worker; no parameter or gradient is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch

from unicron_lightning.replica.fabric import ReplicaFabric, run_released
from unicron_lightning.worker.communication.communicator import gather_bytes
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.evaluation import unfinished
from unicron_lightning.worker.operations import pack_parts
from unicron_lightning.worker.report_sum import Report, ReportSum
from unicron_lightning.worker.rows import share


class ReplicaEvaluation:
    """The operation. Its result is `pack_parts` of each member's results.

    Args:
        batches: all of them, by number.
        size: samples of a batch, by number.
        fabric: provides this worker's place, and receives its progress.
        device: of the model.
        call: runs some batches of one size forward, with the partners; arguments: their numbers, and the size.
        tells: whether this worker reports its replica's results.
        results: returns the results of some batches, by their numbers, as bytes.
    """

    name = "evaluation"

    def __init__(
        self,
        batches: Sequence[int],
        size: Callable[[int], int],
        fabric: ReplicaFabric[Any],
        device: torch.device,
        call: Callable[[Sequence[int], int], None],
        results: Callable[[Collection[int]], bytes],
        *,
        tells: bool,
    ) -> None:
        self._batches = list(batches)
        self._size = size
        self._fabric = fabric
        self._device = device
        self._call = call
        self._tells = tells
        self._results = results
        self._finished: set[int] = set()
        self._calls: list[list[int]] = []

    def plan(self, reports: ReportSum, rank: int) -> None:
        place = self._fabric.place
        assert place is not None
        own = plan_evaluation(self._batches, reports, place.replica, len(place.layout.replicas))
        self._calls = [list(call) for _, call in groupby(own, self._size)]

    def attempt(self, engine: Engine) -> bytes:
        fabric = self._fabric
        for call in self._calls:
            fabric.phase = "calls"
            run_released(partial(self._call, call, self._size(call[0])))
            fabric.arrive(self._device)
            if self._tells:
                self._finished.update(call)
        engine.fault("evaluated", engine.step)
        told = self._results(sorted(self._finished))
        parts = gather_bytes(engine.communicator, told, engine.tag(self.name))
        fabric.phase = "idle"
        return pack_parts(parts)

    def suspend(self) -> None:
        pass

    def report(self) -> Report:
        return {"finished": sorted(self._finished)}

    def adopt(self, result: bytes) -> None:
        self._fabric.phase = "idle"


def plan_evaluation(batches: Sequence[int], reports: ReportSum, place: int | None, replicas: int) -> list[int]:
    """The batches for a replica: its share of those without results on any present worker.

    Args:
        batches: all.
        reports: of the members; None for members that have not begun.
        place: of the replica; None for a spare.
        replicas: number of replicas.
    """
    return [] if place is None else share(unfinished(batches, reports), place, replicas)
