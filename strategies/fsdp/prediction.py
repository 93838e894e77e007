"""Prediction with a sharded model: rows of batches, each run by a replica, whose workers keep their own batches.

A run is one operation of all members, since its forwards communicate. Complete replicas predict the batches of a lost
worker, and those that its death has interrupted. All shards take part in a forward, so a partner's finished batch of
such a row is computed again, and does not count: each sample belongs to one living worker.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from typing_extensions import override

from unicron_lightning.data.pass_loaders import IndexedBatches
from unicron_lightning.data.stream_batches import StreamBatches, StreamRows
from unicron_lightning.replica.evaluation import ReplicaEvaluation
from unicron_lightning.strategies.passes.prediction import PredictionLoader, Predictions, part, reported
from unicron_lightning.worker.report_sum import Report, ReportSum
from unicron_lightning.worker.rows import plan_rows

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from unicron_lightning.strategies.fsdp.parallel import FsdpParallel


class RowSource(Protocol):
    """This worker's batches of the rows of one loader."""

    def plan(self, known: frozenset[int], replica: int | None, replicas: int) -> bool:
        """Divide the rows with batches that no present worker has predicted.

        Args:
            known: numbers in the members' reports.
            replica: place of this worker's replica; None for a spare.
            replicas: number of replicas.

        Returns:
            Whether this worker may have rows.
        """

    def rows(self) -> Iterator[tuple[int, bool]]:
        """Yield the number of this worker's batch in each of its rows, and whether its prediction is kept; otherwise
        the batch only lets the partners compute theirs.
        """

    def stand_in(self, number: int) -> Any:
        """Return the samples for a batch whose prediction is not kept."""


class IndexedRows:
    """Rows of data with an index; implements `RowSource`.

    Args:
        batches: of the loader.
        size: batches of a row, fewer in the last one.
        shard: place of this worker's batch in a row.
    """

    def __init__(self, batches: IndexedBatches, size: int, shard: int) -> None:
        self._batches = batches
        self._size = size
        self._shard = shard
        self._planned: list[tuple[int, bool]] = []

    def plan(self, known: frozenset[int], replica: int | None, replicas: int) -> bool:
        """See `RowSource.plan`; request the samples ahead."""
        batches = range(self._batches.number)
        rows = plan_rows(batches, known, replica, replicas, width=self._size).rows
        own = (batches[row * self._size : (row + 1) * self._size] for row in rows)
        self._planned = [own_batch(row, known, self._shard) for row in own]
        self._batches.expect([number for number, _ in self._planned])
        return bool(rows)

    def rows(self) -> Iterator[tuple[int, bool]]:
        yield from self._planned

    def stand_in(self, number: int) -> Any:
        return self._batches.get(number)


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
        operation = RowPrediction(
            self._parallel, self._loaders, [self._source(each) for each in self._loaders], self._run
        )
        # Parameters are gathered into normal tensors, as in training, and a failure may change them.
        refused = self._parallel.strategy.collectives.refused("predict_step")
        with refused, torch.inference_mode(False), torch.no_grad():
            self._engine.run(operation)
        for loader in self._loaders:
            loader.end()

    def _source(self, loader: PredictionLoader) -> RowSource:
        size, shard, batches = self._parallel.size, self._parallel.shard, loader.batches
        if isinstance(batches, StreamBatches):
            return StreamRows(batches, size, shard, self._exchange, loader.finished)
        assert isinstance(batches, IndexedBatches)
        return IndexedRows(batches, size, shard)

    def _exchange(self, word: int) -> list[int]:
        """Return the words of the workers of this replica, by shard.

        Raises:
            RuntimeError: the connections are closed.
        """
        group = self._parallel.member.model.group
        words = torch.zeros(group.size(), dtype=torch.int64)
        words[group.rank()] = word
        group.sum(words)
        return words.tolist()

    def _run(self, place: int, source: RowSource, number: int, counts: bool) -> None:
        """Run a batch of a loader together with the partners."""
        loader, loop = self._loaders[place], self._trainer.predict_loop
        self._prepare(place, number)
        if counts:
            with self._interruptible(place):
                loop._predict_step(loader.fetch(number), loader.record(number), place, None)
            loader.finished.add(number)
            return
        strategy = self._parallel.strategy
        samples = strategy.to_device(source.stand_in(number), place)
        arguments = loop._build_kwargs(samples, loader.started, place if len(self._loaders) > 1 else None)
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
        loaders: of the run, which keep what this worker reports.
        sources: this worker's batches, by loader.
        run: runs a batch together with the partners; arguments: place of its loader, its source, its number, and
            whether its prediction is kept.
    """

    name = "prediction"

    def __init__(
        self,
        parallel: FsdpParallel,
        loaders: Sequence[PredictionLoader],
        sources: Sequence[RowSource],
        run: Callable[[int, RowSource, int, bool], None],
    ) -> None:
        fabric, device = parallel.member.fabric, parallel.member.model.device
        super().__init__((), lambda _: 0, fabric, device, self._run_all, lambda _: b"", tells=False)
        self._loaders = loaders
        self._sources = sources
        self._run_row = run

    @override
    def report(self) -> Report:
        return reported(self._loaders)

    @override
    def _calls(self, reports: ReportSum, rank: int) -> list[list[int]]:
        replica, replicas = self._place.replica, len(self._place.layout.replicas)
        planned = [
            source.plan(part(reports, number).finished, replica, replicas)
            for number, source in enumerate(self._sources)
        ]
        return [[0]] if any(planned) else []  # one call has all rows, of which some end unexpectedly

    def _run_all(self, *_: Any) -> None:
        for place, source in enumerate(self._sources):
            for number, counts in source.rows():
                self._run_row(place, source, number, counts)


def own_batch(row: range, known: Collection[int], shard: int) -> tuple[int, bool]:
    """A shard's batch of a row, and whether it counts; the last batch, which does not, if the row has fewer."""
    number = row[min(shard, len(row) - 1)]
    return number, shard < len(row) and number not in known
