"""Prediction: each batch is predicted by one worker of the present world, and those of a lost worker by the others.

In the declared world the batches of each rank, their numbers and their indices are those of Lightning's ddp: device
``r`` of ``W`` predicts every ``W``-th sample. The run ends with one operation of all members, in which survivors
predict the batches whose predictions a dead worker had in its memory. So when the loop's epoch-level hooks run and
`trainer.predict` returns, each sample belongs to exactly one of the living workers.

A worker that returns has no state before its first ``fit``; the members have its batches, so it predicts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, Final

import lightning.pytorch as pl
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.utilities.types import _PREDICT_OUTPUT
from torch.utils.data import DataLoader, IterableDataset

from unicron_lightning.copying import OfProcess, replace_method
from unicron_lightning.data.passes import EvaluationLoader, PassBatches
from unicron_lightning.data.streams import ENDS
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.operations import Evaluation
from unicron_lightning.worker.rows import Report, ReportSum

PART: Final = 2 * ENDS
"""Distance between the numbers of two loaders."""


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
        batches: its batches.
        predictions: the run.

    Attributes:
        started: number of this rank's batches in the pass so far.
    """

    def __init__(self, loader: DataLoader[Any], batches: PassBatches, predictions: Predictions) -> None:
        super().__init__(loader, batches, predictions.begin, partial(predictions.start_batch, self))
        self.started = 0
        numbered: Any = None if isinstance(loader.dataset, IterableDataset) else loader.batch_sampler
        self._recorded: Any = None if numbered is None else _IndexBatchSamplerWrapper(numbered)
        self._predictions = predictions

    def record(self, number: int) -> int:
        """Record the indices of a batch for prediction writers; return the batch's place on this rank."""
        place, self.started = self.started, self.started + 1
        if self._recorded is None:
            # Writers get none of a stream's batch; Lightning would give them those of the loader before.
            self._predictions.trainer.predict_loop.current_batch_indices = []
        else:
            self.batch_sampler = self._recorded  # Lightning's loop reads the indices there
            self._recorded.seen_batch_indices.append(self.batches.indices(number))
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

    Attributes:
        trainer: as above.
    """

    def __init__(self, trainer: pl.Trainer, engine: Engine) -> None:
        self.trainer = trainer
        self._engine = engine
        self._begun = False
        self._current: tuple[PredictionLoader, int] | None = None
        self._place = (0, 0)
        replace_method(trainer.predict_loop, "on_run_end", self._end)

    @property
    def place(self) -> tuple[int, int]:
        """Index of the loader and number of the present batch."""
        return self._place

    def begin(self, loader: PredictionLoader) -> Iterable[int]:
        """Start the pass over a loader; return this rank's batches."""
        self._complete()
        self._engine.activity.enter("validation")
        self._begin_all()
        if not self._engine.has_state:
            return []
        return loader.todo(part(self._engine.reports, self._loaders.index(loader)), self._engine.world.rank)

    def start_batch(self, loader: PredictionLoader, number: int) -> None:
        """Record the start of a batch, and so the end of the one before."""
        self._complete()
        self._current = loader, number
        loader.record(number)
        self._prepare(self._loaders.index(loader), number)

    def _end(self, own: Callable[[], _PREDICT_OUTPUT | None]) -> _PREDICT_OUTPUT | None:
        """Finish the last pass before the loop's own end."""
        self.finish()
        return own()

    def finish(self) -> None:
        """Complete the run: return when each batch has been predicted by a living worker."""
        self._complete()
        begun, self._begun = self._begun, False
        if not begun or not self._engine.has_state:
            return
        for loader in self._loaders:
            loader.end()
        self._engine.run(Prediction(self._loaders, self._predict))
        for loader in self._loaders:
            loader.end()

    @property
    def _loaders(self) -> list[PredictionLoader]:
        combined = self.trainer.predict_loop._combined_loader
        assert combined is not None
        loaders: list[PredictionLoader] = combined.flattened
        return loaders

    def _begin_all(self) -> None:
        """Begin the passes of all loaders, once in a run."""
        if self._begun:
            return
        self._begun = True
        for loader, most in zip(self._loaders, self.trainer.predict_loop.max_batches, strict=True):
            loader.begin(self.trainer.current_epoch, most)
            loader.withdraw(0)

    def _complete(self) -> None:
        if self._current is not None:
            loader, number = self._current
            loader.finished.add(number)
        self._current = None

    def _prepare(self, place: int, number: int) -> None:
        self._place = place, number
        self._engine.activity.enter("validation", number)
        self._engine.fault("validation", self._engine.step)

    def _predict(self, number: int) -> None:
        """Predict a batch left over by a lost rank, or by Lightning's limit."""
        place, own = divmod(number, PART)
        loader = self._loaders[place]
        self._prepare(place, own)
        self.trainer.predict_loop._predict_step(loader.batches.get(own), loader.record(own), place, None)
        loader.finished.add(own)


class Prediction(Evaluation[int]):
    """The end of a run.

    Args:
        loaders: of the run; a number of one is increased by `PART` for each loader before it.
        run: as of `Evaluation`.
    """

    name = "prediction"

    def __init__(self, loaders: Sequence[EvaluationLoader], run: Callable[[int], None]) -> None:
        super().__init__(self._left, run, (), lambda: b"")
        self._loaders = loaders

    def _left(self, reports: ReportSum, rank: int) -> Iterator[int]:
        for place, loader in enumerate(self._loaders):
            yield from (place * PART + number for number in loader.todo(part(reports, place), rank))

    def report(self) -> Report:
        return reported(self._loaders)


def reported(loaders: Sequence[EvaluationLoader]) -> Report:
    """Return a worker's report of a run: the numbers of all loaders."""
    return {"finished": sorted(place * PART + n for place, loader in enumerate(loaders) for n in loader.finished)}


def part(reports: ReportSum, place: int) -> ReportSum:
    """Return the reports of one loader's numbers."""
    numbers = frozenset(number % PART for number in reports.finished if number // PART == place)
    return replace(reports, finished=numbers)
