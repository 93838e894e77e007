"""Validation and test of a sharded model: rows of a pass's global batches, run by all replicas together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader
from typing_extensions import override

from unicron_lightning.data.order import check_loader
from unicron_lightning.data.seeding import place_seed, seed_all
from unicron_lightning.replica.evaluation import ReplicaEvaluation
from unicron_lightning.strategies.fsdp.steps import ReplicaRows
from unicron_lightning.strategies.micro_batch import UNCOUNTED
from unicron_lightning.strategies.passes.global_passes import GlobalPasses, PassBatch
from unicron_lightning.strategies.state.module_buffers import EvaluationBuffers
from unicron_lightning.worker.report_sum import Report, ReportSum
from unicron_lightning.worker.rows import share

if TYPE_CHECKING:
    from unicron_lightning.strategies.fsdp.parallel import FsdpParallel


class ShardedEvaluation(GlobalPasses):
    """Passes of a sharded model, of which each worker runs its own batch of a row.

    Args:
        parallel: the parallelism that they belong to.
    """

    def __init__(self, parallel: FsdpParallel) -> None:
        super().__init__(parallel.strategy)
        self._parallel = parallel

    @override
    def check_data(self, loader: DataLoader[Any]) -> None:
        check_loader(loader)

    @override
    def operation(self, batch: PassBatch) -> ReplicaEvaluation:
        member = self._parallel.member
        rows = _PassRows(self._parallel, batch)
        return RowEvaluation(
            rows.numbers, lambda row: 0, member.fabric, member.model.device, rows.call, rows.results, tells=True
        )


class RowEvaluation(ReplicaEvaluation):
    """Some rows of a pass, of which each worker has the results of its own batches."""

    def plan(self, reports: ReportSum, rank: int) -> None:
        place = self._fabric.place
        assert place is not None
        left = unfinished_rows(self._batches, reports.members, place.layout.shards, self._fabric.shape.shards)
        own = [] if place.replica is None else share(left, place.replica, len(place.layout.replicas))
        self._calls = [own] if own else []


def unfinished_rows(
    rows: Sequence[int], reports: Sequence[Report | None], shards: Sequence[int | None], size: int
) -> list[int]:
    """The rows of which some shard's results are on no present worker.

    Args:
        rows: all.
        reports: of the members, by rank; None for members that have not begun.
        shards: of the members, by rank.
        size: number of shards.
    """
    done: list[set[int]] = [set() for _ in range(size)]
    for report, shard in zip(reports, shards, strict=True):
        if report is not None and shard is not None:
            done[shard].update(report["finished"])
    finished = set.intersection(*done)
    return [row for row in rows if row not in finished]


class _PassRows:
    """One global batch, row by row.

    Args:
        parallel: provides module and place.
        batch: the global batch.
    """

    def __init__(self, parallel: FsdpParallel, batch: PassBatch) -> None:
        self._rows = ReplicaRows(batch.batch, parallel.size, parallel.shard)
        self.numbers = self._rows.numbers
        self._strategy = parallel.strategy
        self._batch = batch
        self._buffers = EvaluationBuffers(parallel.strategy.module)
        self._counted: dict[int, list[int]] = {}

    def call(self, rows: Sequence[int], _: int) -> None:
        """Run some rows forward, together with the partners."""
        strategy, engine, batch = self._strategy, self._strategy.engine, self._batch
        for row in rows:
            number, counts = self._rows.own(row)
            self._counted[row] = [number] if counts else []
            if self._rows.is_empty(row):
                continue
            engine.activity.enter("validation", number)
            engine.fault("validation", engine.step)
            samples = (batch.batch.fetch if counts else batch.batch.stand_in)(number)
            seed_all(place_seed(strategy.seed, *batch.place(number)))  # fetching may have drawn numbers
            data = strategy.to_device(samples, batch.loader)
            batch.metrics.start_micro_batch()
            try:
                with batch.recording(data) as calls, strategy.precision_plugin.val_step_context():
                    batch.run(data)
            except BaseException:
                batch.metrics.restore()
                raise
            finally:
                self._buffers.undo()
            batch.metrics.finish_micro_batch(number if counts else UNCOUNTED)
            if counts:
                batch.calls[number] = calls
                batch.batch.finished(number)

    def results(self, rows: Collection[int]) -> bytes:
        """Encode the values logged by this worker's batches of some rows."""
        return self._batch.results(number for row in rows for number in self._counted[row])
