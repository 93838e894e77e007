"""Epochs with different steps: by Lightning's ``GradientAccumulationScheduler``, or by a batch sampler of the user.

The rounds of a step are a function of the epoch (`StepShape.of`), so no failure, join or resume changes them; so is the
number of batches, if the sampler's order depends on the epoch alone. Lightning
counts steps, and has to know their number when an epoch begins: before its hooks, its iteration and its first batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.data import sized_len
from typing_extensions import override

from unicron_lightning.data.combined_loader import CombinedSteps
from unicron_lightning.data.loader import InPlace, StepLoader
from unicron_lightning.data.order import StepShape
from unicron_lightning.errors import ConfigError

Rounds = tuple[tuple[int, int], ...]
"""Epochs and the rounds from each on, as in `StepShape`."""


class FollowedScheduler(GradientAccumulationScheduler):
    """Takes the place of the script's callback: the trainer's own number of batches in a step stays 1.

    Args:
        scheduling: as the script's.
        accumulation: number of batches in a step by ``Trainer(accumulate_grad_batches=...)``.
    """

    def __init__(self, scheduling: dict[int, int], accumulation: int) -> None:
        super().__init__(scheduling)
        self._accumulation = accumulation

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check the settings as Lightning does, which refuses a number of batches beside a schedule."""
        trainer.accumulate_grad_batches = self._accumulation
        super().on_train_start(trainer, pl_module)
        trainer.accumulate_grad_batches = 1

    @override
    def on_train_epoch_start(self, *_: Any) -> None:
        """Leave the trainer as it is; `Schedule` follows the epochs."""


def take_schedule(trainer: pl.Trainer) -> Rounds:
    """Return a trainer's schedule, whose callback is replaced; empty if it has none, or one that changes nothing.

    Raises:
        ConfigError: the callback decides otherwise than by its schedule; validations count batches over several epochs.
    """
    rounds: Rounds = ()
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for place, callback in enumerate(callbacks):
        if not isinstance(callback, GradientAccumulationScheduler):
            continue
        if type(callback) not in (GradientAccumulationScheduler, FollowedScheduler):
            raise ConfigError(
                f"{type(callback).__qualname__}(scheduling={callback.scheduling}) may decide by more than its "
                "schedule, which workers must know for all epochs: expected Lightning's GradientAccumulationScheduler"
            )
        callbacks[place] = FollowedScheduler(dict(callback.scheduling), trainer.accumulate_grad_batches)
        rounds = tuple(sorted(callback.scheduling.items()))
    interval = getattr(trainer, "val_check_interval", None)
    if len({each for _, each in rounds}) > 1 and trainer.check_val_every_n_epoch is None and isinstance(interval, int):
        raise ConfigError(
            f"Trainer(val_check_interval={interval}, check_val_every_n_epoch=None) counts batches over several epochs, "
            f"whose steps have different numbers of them by GradientAccumulationScheduler(scheduling={dict(rounds)}): "
            "leave check_val_every_n_epoch out"
        )
    return rounds


class Schedule:
    """Follows the epochs of a trainer whose steps have different shapes.

    Attributes:
        val_check_interval: the trainer's, if an integer: in batches of a device.
    """

    def __init__(self) -> None:
        self.val_check_interval: int | None = None

    def attend(
        self, trainer: pl.Trainer, loader: StepLoader | CombinedSteps, shape: StepShape, sampled: InPlace
    ) -> None:
        """Follow the epochs of training data, if its steps or their number change.

        Args:
            trainer: iterates over it.
            loader: yields the steps.
            shape: of the steps.
            sampled: a loader on whose sampler Lightning sets the epoch.
        """
        if shape.schedule or (isinstance(loader, StepLoader) and loader.varies):
            if self.val_check_interval is not None:  # Lightning compares it with the length of this data epoch
                epoch: Any = trainer.fit_loop.epoch_progress.current
                trainer.val_check_interval = shape.of(epoch.processed).steps(self.val_check_interval)
            start: Any = _EpochStart(sampled.sampler, lambda epoch: self._begin(trainer, loader, shape.of(epoch)))
            sampled.sampler = start

    def _begin(self, trainer: pl.Trainer, loader: StepLoader | CombinedSteps, shape: StepShape) -> None:
        """Set the numbers of steps and batches that Lightning has determined once, for the present epoch's."""
        loop = trainer.fit_loop
        combined: CombinedLoader | None = loop._combined_loader
        length = sized_len(loader)
        if combined is None or loop._data_fetcher is None:
            return
        if length is not None and not isinstance(loader, CombinedSteps):  # which knows its limits
            limit = trainer.limit_train_batches
            length = min(length, limit) if isinstance(limit, int) else int(length * limit)
            combined.limits = [length]
        if length is not None:
            loop.max_batches = loop._data_fetcher.length = length
        if getattr(trainer, "_val_check_time_interval", None) is not None:
            return
        if self.val_check_interval is not None:
            trainer.val_check_interval = trainer.val_check_batch = shape.steps(self.val_check_interval)
        elif length is not None:  # a stream may have none in any epoch
            trainer.val_check_batch = max(1, int(length * trainer.val_check_interval))


class _EpochStart:
    """A sampler for Lightning, which sets the epoch on each sampler before the epoch's hooks.

    Args:
        sampler: the loader's own.
        begins: called with the epoch.
    """

    def __init__(self, sampler: Any, begins: Callable[[int], None]) -> None:
        self._sampler = sampler
        self._begins = begins

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch."""
        set_epoch = getattr(self._sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        self._begins(epoch)
