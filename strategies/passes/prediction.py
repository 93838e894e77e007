"""Prediction: each batch is predicted by one worker of the present world, and those of a lost worker by the others.

In the declared world the batches of each rank, their numbers and their indices are those of Lightning's ddp: device
``r`` of ``W`` predicts every ``W``-th sample. The run ends with one operation of all members, in which survivors
predict the batches whose predictions a dead worker had in its memory. So when the loop's epoch-level hooks run and
`trainer.predict` returns, each sample belongs to exactly one of the living workers.

A worker that returns has no state before its first ``fit``; the members have its batches, so it predicts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any, SupportsIndex

import lightning.pytorch as pl
from lightning.pytorch.loops.prediction_loop import _PredictionLoop
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.utilities.types import _PREDICT_OUTPUT
from torch.utils.data import DataLoader

from unicron_lightning.copying import OfProcess
from unicron_lightning.data.order import DataOrder, StepShape
from unicron_lightning.data.pass_loaders import EvaluationLoader
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.evaluation import Evaluation, unfinished
from unicron_lightning.worker.ledger import share
from unicron_lightning.worker.report_sum import ReportSum


def unwrapped(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader with the user's batch sampler, which Lightning wraps for prediction to record indices."""
    wrapper = loader.batch_sampler
    if not isinstance(wrapper, _IndexBatchSamplerWrapper):
        return loader
    own: Any = wrapper._batch_sampler
    plain = copy(loader)
    vars(plain).update(batch_sampler=own, sampler=getattr(own, "sampler", loader.sampler))
    return plain


class PredictionLoader(EvaluationLoader):
    """Yields this rank's batches of a prediction.

    Args:
        loader: the user's, `unwrapped`.
        devices: of the declared world.
        seed: of augmentation.
        predictions: the run.

    Attributes:
        started: number of this rank's batches in the pass so far.
    """

    def __init__(self, loader: DataLoader[Any], devices: int, seed: int, predictions: Predictions) -> None:
        order = DataOrder(loader, StepShape(devices=devices, accumulation=1), seed)
        super().__init__(loader, order, seed, predictions.begin, partial(predictions.start_batch, self))
        self.started = 0
        batches: Any = loader.batch_sampler
        self._recorded: Any = None if batches is None else _IndexBatchSamplerWrapper(batches)

    def expect(self, numbers: list[int]) -> None:
        """Request the samples of these batches ahead, instead of any requested before."""
        self.end()
        self._planned = numbers

    def record(self, number: int) -> int:
        """Record the indices of a batch for prediction writers; return the batch's place on this rank."""
        place, self.started = self.started, self.started + 1
        if self._recorded is not None:
            self.batch_sampler = self._recorded  # Lightning's loop reads the indices there
            self._recorded.seen_batch_indices.append(self.indices(number))
        return place

    def withdraw(self, started: int) -> None:
        """Forget all but the first ``started`` batches of this pass; 0: those of the pass before."""
        self.started = started
        if self._recorded is not None:
            self._recorded.seen_batch_indices = self._recorded.seen_batch_indices[:started] if started else []


class Predictions(OfProcess):
    """One run of ``trainer.predict``.

    The batches of all loaders have one numbering, because a worker that dies takes the predictions of all its passes
    with it.

    Args:
        trainer: runs the loop.
        engine: this worker's engine.
    """

    def __init__(self, trainer: pl.Trainer, engine: Engine) -> None:
        self._trainer = trainer
        self._engine = engine
        self._parts: list[range] | None = None
        self._planned: list[int] = []
        self._part = range(0)
        self._current: int | None = None
        self._finished: set[int] = set()
        trainer.predict_loop.on_run_end = _End(self, trainer.predict_loop)  # type: ignore[method-assign]

    def begin(self, loader: PredictionLoader) -> list[int]:
        """Start the pass over a loader; return this rank's batches."""
        self._complete()
        self._engine.activity.enter("validation")
        if self._parts is None:
            self._parts = self._divide()
            if self._engine.has_state:
                self._planned = plan_parts(self._parts, self._engine.reports, self._engine.world.rank)
        self._part = self._parts[next(place for place, other in enumerate(self._loaders) if other is loader)]
        return [number - self._part.start for number in self._planned if number in self._part]

    def start_batch(self, loader: PredictionLoader, number: int) -> None:
        """Record the start of a batch, and so the end of the one before."""
        self._complete()
        self._current = self._part.start + number
        loader.record(number)
        self._prepare(number)

    def finish(self) -> None:
        """Complete the run: return when each batch has been predicted by a living worker."""
        self._complete()
        parts, self._parts = self._parts, None
        if parts is None or not self._engine.has_state:
            return
        for loader in self._loaders:
            loader.end()
        self._engine.run(Prediction(parts, partial(self._predict, parts), self._finished))

    @property
    def _loaders(self) -> list[PredictionLoader]:
        combined = self._trainer.predict_loop._combined_loader
        assert combined is not None
        loaders: list[PredictionLoader] = combined.flattened
        return loaders

    def _divide(self) -> list[range]:
        """Begin the passes of all loaders; return their batches in the common numbering."""
        parts, start = [], 0
        for loader, most in zip(self._loaders, self._trainer.predict_loop.max_batches, strict=True):
            loader.limit(int(most))
            loader.set_epoch(self._trainer.current_epoch)
            loader.withdraw(0)
            parts.append(range(start, start + loader.num_batches))
            start = parts[-1].stop
        return parts

    def _complete(self) -> None:
        if self._current is not None:
            self._finished.add(self._current)
        self._current = None

    def _prepare(self, number: int) -> None:
        self._engine.activity.enter("validation", number)
        self._engine.fault("validation", self._engine.step)

    def _predict(self, parts: list[range], number: int) -> None:
        """Predict a batch left over by a lost rank, or by Lightning's limit."""
        place = next(place for place, part in enumerate(parts) if number in part)
        loader, own = self._loaders[place], number - parts[place].start
        self._prepare(own)
        self._trainer.predict_loop._predict_step(loader.fetch(own), loader.record(own), place, None)
        self._finished.add(number)


class Prediction(Evaluation):
    """The end of a run.

    Args:
        parts: the batches of each loader, in the common numbering.
        run, finished: as of `Evaluation`.
    """

    name = "prediction"

    def __init__(self, parts: Sequence[range], run: Callable[[int], None], finished: set[int]) -> None:
        super().__init__(parts[-1].stop, run, finished, lambda: b"")
        self._parts = parts

    def plan(self, reports: ReportSum, rank: int) -> None:
        planned = plan_parts(self._parts, reports, rank)
        self._todo = [number for number in planned if number not in self._finished]


def plan_parts(parts: Sequence[range], reports: ReportSum, rank: int) -> list[int]:
    """The batches for ``rank``: of each loader, its share of those that no rank has predicted so far."""
    shares = [share(unfinished(part, reports), rank, reports.world) for part in parts]
    return [number for numbers in shares for number in numbers]


class _End:
    """``on_run_end`` of the loop, which first finishes the last pass; a copy does only what the loop's own does."""

    def __init__(self, predictions: Predictions, loop: _PredictionLoop) -> None:
        self._predictions, self._loop = predictions, loop

    def __call__(self) -> _PREDICT_OUTPUT | None:
        self._predictions.finish()
        return type(self._loop).on_run_end(self._loop)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return partial, (type(self._loop).on_run_end, self._loop)
