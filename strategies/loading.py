"""The user's data loaders, wrapped for what they are used for."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from unicron_lightning.data.loader import EvaluationLoader, PassLoader, TrainingLoader
from unicron_lightning.data.order import DataOrder, StepShape, check_loader
from unicron_lightning.errors import ConfigError

if TYPE_CHECKING:
    from unicron_lightning.strategies.unicron import UnicronStrategy


class Loaders:
    """Wraps loaders as Lightning asks for it, and ends their worker processes.

    Args:
        strategy: whose world, passes and boundary they follow.
    """

    def __init__(self, strategy: UnicronStrategy) -> None:
        self._strategy = strategy
        self._made: list[TrainingLoader | EvaluationLoader | PassLoader] = []

    def wrap(self, trainer: pl.Trainer, loader: object, shape: StepShape, seed: int) -> object:
        """What the loop of the trainer's present stage iterates over instead of ``loader``.

        Raises:
            ConfigError: for loaders that can't be dealt out, and for prediction with more than one worker.
        """
        check_loader(loader)
        assert isinstance(loader, DataLoader)
        if trainer.predicting:
            if self._strategy.engine.world.size > 1:
                raise ConfigError(
                    f"trainer.predict() under the unicron strategy needs a world of one worker; it has "
                    f"{self._strategy.engine.world.size}"
                )
            return loader
        made: TrainingLoader | EvaluationLoader
        if trainer.training:
            made = self._training(trainer, loader, shape, seed)
        else:
            made = EvaluationLoader(loader, shape.devices, seed, self._begin_pass, self._start_batch)
        self._made.append(made)
        return made

    def keep(self, loader: PassLoader) -> PassLoader:
        """Ends the worker processes of one that was made elsewhere, too."""
        self._made.append(loader)
        return loader

    @property
    def training(self) -> TrainingLoader | None:
        """The present run's of training data."""
        return next((made for made in reversed(self._made) if isinstance(made, TrainingLoader)), None)

    def end_passes(self) -> None:
        """A validation is over: worker processes end that are not persistent."""
        for loader in self._made:
            if isinstance(loader, PassLoader):
                loader.end()

    def close(self) -> None:
        """The run is over."""
        for loader in self._made:
            loader.close()
        self._made = []

    def _training(self, trainer: pl.Trainer, loader: DataLoader[Any], shape: StepShape, seed: int) -> TrainingLoader:
        limit = None
        if isinstance(trainer.limit_train_batches, int):
            limit = -(-trainer.limit_train_batches // shape.accumulation)
        order = DataOrder(loader, shape, int(os.environ.get("PL_GLOBAL_SEED", "0")))  # as Lightning's ddp
        loop = trainer.fit_loop

        def position() -> tuple[int, int]:
            epoch: Any = loop.epoch_progress.current
            return epoch.processed, loop.epoch_loop.batch_progress.current.ready

        def ended() -> None:
            self._strategy.engine.activity.enter("epoch_end")

        boundary = partial(self._strategy.boundary, trainer)
        return TrainingLoader(loader, order, seed, limit, position, self._strategy.share, boundary, ended)

    def _begin_pass(self, loader: EvaluationLoader) -> list[int]:
        return self._strategy.passes.begin(loader)

    def _start_batch(self, number: int) -> None:
        self._strategy.passes.start_batch(number)
