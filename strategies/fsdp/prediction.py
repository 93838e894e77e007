"""Prediction with a sharded model: rows of batches, each run by a replica, whose workers keep their own batches.

A run is one operation of all members, since its forwards communicate. Complete replicas predict the batches of a lost
worker, and those that its death has interrupted. All shards take part in a forward, so a partner's finished batch of
such a row is computed again, and does not count: each sample belongs to one living worker.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from unicron_lightning.data.pass_loaders import IndexedBatches
from unicron_lightning.replica.evaluation import ReplicaEvaluation
from unicron_lightning.strategies.passes.prediction import PART, PredictionLoader, Predictions
from unicron_lightning.worker.evaluation import unfinished
from unicron_lightning.worker.ledger import share
from unicron_lightning.worker.report_sum import Report, ReportSum

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from unicron_lightning.strategies.fsdp.parallel import FsdpParallel


@dataclass(frozen=True, kw_only=True)
class RowBatch:
    """One worker's batch of a row.

    Attributes:
        loader: index of its loader.
        number: of the batch, in the common numbering of all loaders.
        counts: whether its prediction is kept; other batches only let the partners compute theirs.
    """

    loader: int
    number: int
    counts: bool


class ShardedPredictions(Predictions):
    """One run of ``trainer.predict``.

    Args:
        trainer: runs the loop, whose loaders yield nothing to it: its steps are called here.
        parallel: provides strategy, member and place.
    """

    def __init__(self, trainer: pl.Trainer, parallel: FsdpParallel) -> None:
        super().__init__(trainer, parallel.strategy.engine)
        self._parallel = parallel

    @override
    def begin(self, loader: PredictionLoader) -> list[int]:
        self._begin_all()
        return []

    @override
    def finish(self) -> None:
        begun, self._begun = self._begun, False
        if not begun or not self._engine.has_state:
            return
        parts = [range(PART * place, PART * place + each.number) for place, each in enumerate(self._batches)]
        operation = RowPrediction(self._parallel, parts, partial(self._expect, parts), partial(self._run, parts))
        # Parameters are gathered into normal tensors, as in training, and a failure may change them.
        refused = self._parallel.strategy.collectives.refused("predict_step")
        with refused, torch.inference_mode(False), torch.no_grad():
            self._engine.run(operation)
        for loader in self._loaders:
            loader.end()

    @property
    def _batches(self) -> list[IndexedBatches]:
        return [loader.batches for loader in self._loaders if isinstance(loader.batches, IndexedBatches)]

    def _expect(self, parts: Sequence[range], batches: Sequence[RowBatch]) -> None:
        """Request the samples of a plan's batches ahead."""
        for place, (own, part) in enumerate(zip(self._batches, parts, strict=True)):
            own.expect([batch.number - part.start for batch in batches if batch.loader == place])

    def _run(self, parts: Sequence[range], batch: RowBatch) -> None:
        """Run a batch together with the partners."""
        loader, number = self._loaders[batch.loader], batch.number - parts[batch.loader].start
        self._prepare(number)
        if batch.counts:
            with self._interruptible(batch.loader):
                self._trainer.predict_loop._predict_step(
                    loader.fetch(number), loader.record(number), batch.loader, None
                )
            return
        strategy, loop = self._parallel.strategy, self._trainer.predict_loop
        samples = strategy.to_device(loader.fetch(number), batch.loader)
        arguments = loop._build_kwargs(samples, loader.started, batch.loader if len(parts) > 1 else None)
        strategy.predict_step(*loop._build_step_args_from_hook_kwargs(arguments, "predict_step"))

    @contextmanager
    def _interruptible(self, place: int) -> Iterator[None]:
        """Withdraw the records of a batch that an exception interrupts."""
        loop, loader = self._trainer.predict_loop, self._loaders[place]
        progress, started, indices = loop.batch_progress.state_dict(), loader.started, loop.epoch_batch_indices[place]
        recorded = len(indices)
        try:
            yield
        except BaseException:
            loop.batch_progress.load_state_dict(progress)
            loader.withdraw(started)
            del indices[recorded:]
            raise


class RowPrediction(ReplicaEvaluation):
    """The operation of a run.

    Args:
        parallel: provides place and model.
        parts: the batches of each loader, in the common numbering.
        expect: receives this worker's batches of a plan.
        run: runs one of them, together with the partners.
    """

    name = "prediction"

    def __init__(
        self,
        parallel: FsdpParallel,
        parts: Sequence[range],
        expect: Callable[[Sequence[RowBatch]], None],
        run: Callable[[RowBatch], None],
    ) -> None:
        fabric, device = parallel.member.fabric, parallel.member.model.device
        super().__init__([], lambda _: 0, fabric, device, self._run_all, lambda _: b"", tells=False)
        self._parts = parts
        self._shard = parallel.shard
        self._expect = expect
        self._run = run
        self._predicted: set[int] = set()
        self._planned: list[RowBatch] = []

    @override
    def plan(self, reports: ReportSum, rank: int) -> None:
        place = self._fabric.place
        assert place is not None
        self._planned = []
        if place.replica is not None:
            left = {number for part in self._parts for number in unfinished(part, reports)}
            rows = plan_rows(self._parts, left, self._fabric.shape.shards, place.replica, len(place.layout.replicas))
            self._planned = [own_batch(loader, row, left, self._shard) for loader, row in rows]
        self._calls = [list(range(len(self._planned)))] if self._planned else []
        self._expect(self._planned)

    @override
    def report(self) -> Report:
        return {"finished": sorted(self._predicted)}

    def _run_all(self, places: Sequence[int], _: int) -> None:
        for batch in (self._planned[place] for place in places):
            self._run(batch)
            if batch.counts:
                self._predicted.add(batch.number)


def plan_rows(
    parts: Sequence[range], left: Collection[int], size: int, replica: int, replicas: int
) -> list[tuple[int, range]]:
    """A replica's rows: of each loader, its share of those with batches that no worker has predicted.

    Args:
        parts: the batches of each loader, in the common numbering.
        left: batches that no present worker has predicted.
        size: batches of a row, fewer in a loader's last one.
        replica: place of the replica.
        replicas: number of replicas.

    Returns:
        For each row its loader and its batches.
    """
    planned: list[tuple[int, range]] = []
    for loader, part in enumerate(parts):
        rows = [part[first : first + size] for first in range(0, len(part), size)]
        needed = [place for place, row in enumerate(rows) if any(number in left for number in row)]
        planned += [(loader, rows[place]) for place in share(needed, replica, replicas)]
    return planned


def own_batch(loader: int, row: range, left: Collection[int], shard: int) -> RowBatch:
    """A shard's batch of a row; the last batch, which does not count, if the row has fewer."""
    number = row[min(shard, len(row) - 1)]
    return RowBatch(loader=loader, number=number, counts=shard < len(row) and number in left)
