"""The global batch declared by a trainer's settings, which no failure changes, and epochs with different steps.

Steps differ by Lightning's ``GradientAccumulationScheduler``, or by a batch sampler of the user. The rounds of a step
are a function of the epoch (`StepShape.of`), so no failure, join or resume changes them; so is the number of batches,
if the sampler's order depends on the epoch alone. Lightning counts steps, and has to know their number when an epoch
begins: before its hooks, its iteration and its first batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.data import sized_len
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from unicron_lightning import environ
from unicron_lightning.copying import OfProcess
from unicron_lightning.data.combined import CombinedSteps
from unicron_lightning.data.loader import InPlace
from unicron_lightning.data.order import StepShape
from unicron_lightning.data.steps import TrainingLoader
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
        self, trainer: pl.Trainer, loader: TrainingLoader | CombinedSteps, shape: StepShape, sampled: InPlace
    ) -> None:
        """Follow the epochs of training data, if its steps or their number change.

        Args:
            trainer: iterates over it.
            loader: yields the steps.
            shape: of the steps.
            sampled: a loader on whose sampler Lightning sets the epoch.
        """
        if shape.schedule or (isinstance(loader, TrainingLoader) and loader.steps.varies):
            if self.val_check_interval is not None:  # Lightning compares it with the length of this data epoch
                epoch: Any = trainer.fit_loop.epoch_progress.current
                trainer.val_check_interval = shape.of(epoch.processed).steps(self.val_check_interval)
            start: Any = _EpochStart(sampled.sampler, lambda epoch: self._begin(trainer, loader, shape.of(epoch)))
            sampled.sampler = start

    def _begin(self, trainer: pl.Trainer, loader: TrainingLoader | CombinedSteps, shape: StepShape) -> None:
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


def declare(trainer: pl.Trainer, num_micro_batches: int | None, shards: int, schedule: Schedule) -> StepShape:
    """Take the global batch from the trainer; from then on Lightning counts whole steps.

    Args:
        trainer: its ``accumulate_grad_batches`` becomes 1, as one of its batches is a whole step; an integer
            ``val_check_interval`` is converted from batches per device to steps.
        num_micro_batches: M, if not accumulate_grad_batches x devices x num_nodes / shards.
        shards: devices that hold the model together.
        schedule: receives the integer ``val_check_interval``.

    Raises:
        ConfigError: for a schedule of ``accumulate_grad_batches`` that contradicts other settings; if M can't be
            divided among the declared devices, or they among ``shards``, or if torchrun may start more workers than the
            step has work for.
    """
    epochs = take_schedule(trainer)
    trainer.accumulate_grad_batches = max((each for _, each in epochs), default=trainer.accumulate_grad_batches)
    if trainer.accumulate_grad_batches < 1 or trainer.accumulate_grad_batches % 1:
        raise ConfigError(
            f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches!r}): expected an integer of at least 1"
        )
    if num_micro_batches is None:
        _declare_nodes(trainer, environ.most_workers())
    elif epochs:
        raise ConfigError(
            f"num_micro_batches={num_micro_batches} and GradientAccumulationScheduler(scheduling={dict(epochs)}) both "
            "set the number of a step's micro-batches: leave one of them out"
        )
    devices, rest = divmod(trainer.num_devices * trainer.num_nodes, shards)
    if rest or devices < 1:
        raise ConfigError(
            f"devices x num_nodes = {trainer.num_devices} x {trainer.num_nodes} is no multiple of the {shards} devices "
            "that hold the model together (tensor x pipeline parallelism)"
        )
    rounds = trainer.accumulate_grad_batches
    if num_micro_batches is not None:
        rounds, rest = divmod(num_micro_batches, devices)
        if rest or rounds < 1:
            raise ConfigError(
                f"num_micro_batches={num_micro_batches} does not divide among devices x num_nodes = "
                f"{trainer.num_devices} x {trainer.num_nodes}{'' if shards == 1 else f' / {shards}'} = {devices}; "
                f"expected a multiple of {devices}"
            )
    trainer.accumulate_grad_batches = 1
    shape = StepShape(devices=devices, accumulation=rounds, schedule=epochs)
    if isinstance(interval := getattr(trainer, "val_check_interval", None), int):  # a duration is kept elsewhere
        schedule.val_check_interval = interval
        trainer.val_check_interval = shape.of(0).steps(interval)
    return shape


def _declare_nodes(trainer: pl.Trainer, workers: int) -> None:
    """Set ``num_nodes`` if the user has left it out, from the number of ``workers`` that torchrun may start.

    Under ddp the world is torchrun's whatever the trainer declares, and a difference is an error. Here a declared world
    larger than torchrun's is allowed (the step stays whole in a smaller one), a smaller one is not: workers would idle.

    Raises:
        ConfigError: quoting both worlds.
    """
    devices, nodes = trainer.num_devices, trainer.num_nodes
    if workers <= devices * nodes:
        return
    if nodes == 1 and workers % devices == 0:
        trainer.strategy.num_nodes = workers // devices  # type: ignore[attr-defined]
        rank_zero_info(f"Trainer(num_nodes={trainer.num_nodes}), from torchrun's --nnodes and --nproc-per-node")
    elif trainer.accumulate_grad_batches * devices * nodes < workers:
        raise ConfigError(
            f"Trainer(devices={devices}, num_nodes={nodes}, accumulate_grad_batches={trainer.accumulate_grad_batches}) "
            f"has work for {trainer.accumulate_grad_batches * devices * nodes} workers, but torchrun may start "
            f"{workers} (maximum of --nnodes x --nproc-per-node): set num_nodes so that devices x num_nodes is that, "
            "or UnicronStrategy(num_micro_batches=...) to have workers stand by on purpose"
        )


class TimedValidation(OfProcess):
    """Validation by the clock: one rank's clock decides for all, so that all validate after the same step.

    Lightning validates when rank 0 finds that ``Trainer(val_check_interval=...)``, a duration, has passed.

    Lightning compares each rank's own clock with the time of its last validation. Here that time is set to the past or
    to the future, as was decided.

    Args:
        trainer: whose interval counts; nothing is exchanged if it is no duration.
        decide: gives rank 0's answer on all ranks.
    """

    def __init__(self, trainer: pl.Trainer, decide: Callable[[bool], bool]) -> None:
        self._trainer = trainer
        self._decide = decide
        self._interval: float | None = getattr(trainer, "_val_check_time_interval", None)
        self._last = time.monotonic()

    def stepped(self) -> None:
        """Decide, after a step, whether validation is due."""
        if self._interval is not None:
            due = self._decide(time.monotonic() - self._last >= self._interval)
            self._trainer._last_val_time = -math.inf if due else math.inf  # type: ignore[attr-defined]

    def validated(self) -> None:
        """Note the end of a validation."""
        self._last = time.monotonic()
