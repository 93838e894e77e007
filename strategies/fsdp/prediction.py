"""Prediction with a sharded model: rows of batches, each run by a replica, whose workers keep their own batches.

A run is one operation of all members, since its forwards communicate. Complete replicas predict the batches of a lost
worker, and those that its death has interrupted. All shards take part in a forward, so a partner's finished batch of
such a row is computed again, and does not count: each sample belongs to one living worker. With tensor parallelism
that is the first worker of a lane; the others compute the same batch with it, and keep nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from unicron_lightning.replica.step import RowPass
from unicron_lightning.strategies.passes.prediction import PredictionLoader, Predictions, part, reported
from unicron_lightning.worker.rows import ReportSum

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from unicron_lightning.strategies.fsdp.parallel import FsdpParallel


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
        fabric, model = self._parallel.member.fabric, self._parallel.member.model
        for loader in self._loaders:
            loader.batches.part = self._parallel.holder.part
        report = partial(reported, self._loaders)
        operation = RowPass("prediction", fabric, model.device, self._plan, self._run_all, report)
        # Parameters are gathered into normal tensors, as in training, and a failure may change them.
        refused = self._parallel.strategy.collectives.refused("predict_step")
        with refused, torch.inference_mode(False), torch.no_grad():
            self._engine.run(operation)
        for loader in self._loaders:
            loader.end()

    def _plan(self, reports: ReportSum, replica: int | None, replicas: int) -> bool:
        planned = [
            loader.batches.plan(part(reports, number).finished, replica, replicas, loader.finished)
            for number, loader in enumerate(self._loaders)
        ]
        return any(planned)

    def _run_all(self) -> None:
        self._follow()
        for place, loader in enumerate(self._loaders):
            for number, counts in loader.batches.rows():
                self._run(place, number, counts)

    def _follow(self) -> None:
        """Number batches within a lane as its first worker does; the others may have been in another lane before."""
        lane, part = self._parallel.member.model.group.lane, self._parallel.holder.part
        if lane is None:
            return
        started = torch.tensor([loader.started for loader in self._loaders])
        lane.copy_first(started)
        if not part.speaks:
            for loader, number in zip(self._loaders, started.tolist(), strict=True):
                loader.started = number

    def _run(self, place: int, number: int, counts: bool) -> None:
        """Run a batch of a loader together with the partners."""
        loader, loop = self._loaders[place], self.trainer.predict_loop
        self._prepare(place, number)
        if counts and self._parallel.holder.part.speaks:
            with self._interruptible(place):
                loop._predict_step(loader.batches.get(number), loader.record(number), place, None)
            loader.finished.add(number)
            return
        strategy = self._parallel.strategy
        fetch = loader.batches.get if counts else loader.batches.stand_in  # the lane's own batch, or any
        samples = strategy.to_device(fetch(number), place)
        arguments = loop._build_kwargs(samples, loader.started, place if len(self._loaders) > 1 else None)
        strategy.predict_step(*loop._build_step_args_from_hook_kwargs(arguments, "predict_step"))
        loader.started += counts

    @contextmanager
    def _interruptible(self, place: int) -> Iterator[None]:
        """Withdraw the records of a batch that an exception interrupts."""
        loop, loader = self.trainer.predict_loop, self._loaders[place]
        progress, started, indices = loop.batch_progress.state_dict(), loader.started, loop.epoch_batch_indices[place]
        recorded = len(indices)
        try:
            yield
        except BaseException:
            loop.batch_progress.load_state_dict(progress)
            loader.withdraw(started)
            del indices[recorded:]
            raise
