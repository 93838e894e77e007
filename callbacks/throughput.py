"""Training speed, and the share of time lost: numbers of the whole task, whatever its world is."""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import Any, Final

import lightning.pytorch as pl
from lightning.fabric.utilities.throughput import Throughput, get_available_flops
from lightning.pytorch.callbacks.throughput_monitor import _plugin_to_compute_dtype
from typing_extensions import override

from unicron_lightning.data.loader import GlobalBatch
from unicron_lightning.errors import ConfigError
from unicron_lightning.strategies.fault_tolerant import strategy_of
from unicron_lightning.strategies.reporting import told_flops
from unicron_lightning.worker.engine import Engine

_USUAL: Final = 32
"""Number of undisturbed steps from which the usual step time is computed."""


class TimeAccount:
    """Seconds of a task by use: training, lost to failures, or other work. Pure: times are arguments.

    The *goodput* is the share of the time since the start that was not lost. The lost time consists of

    * the start itself, up to the first step;
    * in a step in which the world changed, the time beyond a usual step in a world of that size;
    * the time between two steps in which the world changed: a join, a leave;
    * after the loss of all members, everything since the checkpoint from which the task resumes.

    Validation, checkpoints and waiting for data are *other* work: wanted, but no training. The slower speed of a
    smaller world counts as training. ``now`` is of any monotonic clock; ``epoch`` is the present world's.

    Args:
        now: time of the start.
    """

    def __init__(self, now: float) -> None:
        self.train = self.lost = self.other = 0.0
        self.steps = 0
        self._mark = now
        self._epoch: int | None = None
        self._worker_seconds: deque[float] = deque(maxlen=_USUAL)

    def step_begins(self, now: float, epoch: int) -> None:
        """Account for the time since the last call, which was no step."""
        if self._epoch == epoch:
            self.other += now - self._mark
        else:
            self.lost += now - self._mark
        self._epoch, self._mark = epoch, now

    def step_ends(self, now: float, epoch: int, world: int) -> float:
        """Account for a finished step in a world of ``world`` workers; return its seconds."""
        seconds = now - self._mark
        useful = seconds
        if epoch == self._epoch:
            self._worker_seconds.append(seconds * world)
        elif self._worker_seconds:
            useful = min(seconds, statistics.median(self._worker_seconds) / world)
        self.train += useful
        self.lost += seconds - useful
        self.steps += 1
        self._epoch, self._mark = epoch, now
        return seconds

    def goodput(self, now: float) -> float:
        """Return the share of the time since the start that was not lost; 0 before the first step."""
        total = self.train + self.lost + self.other + now - self._mark
        return 1.0 - self.lost / total if self.steps and total > 0 else 0.0

    def state(self) -> dict[str, float]:
        """Return the account as plain data."""
        return {"train": self.train, "lost": self.lost, "other": self.other, "steps": self.steps}

    def load_state(self, state: dict[str, float], now: float, away: float) -> None:
        """Continue another worker's account. ``away``: seconds since then in which the task did not train."""
        self.train, self.other, self.steps = state["train"], state["other"], int(state["steps"])
        self.lost = state["lost"] + away
        self._mark = now


class ThroughputMonitor(pl.Callback):
    """Logs the task's throughput and goodput, like Lightning's callback of this name.

    Lightning's own callback multiplies one rank's work by the world size; here ranks do unequal shares and the world
    changes, so global batches are counted. No communication is needed: every worker counts the same, the first one
    logs, and joiners continue from the others' count. Logged every ``log_every_n_steps`` under ``train/``:

        steps_per_sec, micro_batches_per_sec, samples_per_sec, tflops_per_sec, mfu
            over the last ``window_size`` steps, once there are that many; validation is left out
        train_seconds, lost_seconds, other_seconds, goodput
            since the start; see `TimeAccount`

    A sample is an item of the data set. FLOPs need the module's attribute ``flops_per_step``: of one optimizer step of
    the whole task; MFU (share of the devices' peak) needs to know that peak as well.

    Args:
        window_size: number of steps.
        available_flops: of one device, per second; default: Lightning's value for it.

    Raises:
        ConfigError: ``window_size`` is below 2, or, at the start, the strategy is not ``unicron``.
    """

    def __init__(self, window_size: int = 100, available_flops: float | None = None) -> None:
        if window_size < 2:
            raise ConfigError(f"window_size={window_size!r}: expected 2 steps or more")
        self._window_size = window_size
        self._given_flops = self._available_flops = available_flops
        self._flops: float | None = None
        self._engine: Engine | None = None
        self._account: TimeAccount | None = None
        self._training_seconds = 0.0
        self._steps = self._samples = 0
        self._last_end: float | None = None
        self._left_out = 0.0
        self._window = Throughput(window_size=window_size)
        self._micro_batches: deque[int] = deque(maxlen=window_size)
        self._worlds: deque[int] = deque(maxlen=window_size)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._engine = strategy_of(trainer, self).engine
        if stage == "fit":
            self._account = TimeAccount(time.perf_counter())
            self._flops = told_flops(pl_module)
            if self._given_flops is None:
                dtype = _plugin_to_compute_dtype(trainer.precision_plugin)
                self._available_flops = get_available_flops(trainer.strategy.root_device, dtype)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert self._account is not None and self._engine is not None
        self._account.step_begins(time.perf_counter(), self._engine.world.epoch)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: GlobalBatch, batch_idx: int
    ) -> None:
        assert self._account is not None and self._engine is not None
        now, world = time.perf_counter(), self._engine.world
        seconds = self._account.step_ends(now, world.epoch, world.size)
        self._count(batch, seconds if self._last_end is None else now - self._last_end - self._left_out, world.size)
        self._last_end, self._left_out = now, 0.0
        if trainer.is_global_zero and trainer._logger_connector.should_update_logs:
            metrics = {f"train/{name}": value for name, value in self.metrics(now).items()}
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._left_out -= time.perf_counter()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._left_out += time.perf_counter()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self._account is None else {**self._account.state(), "at": time.time()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict and self._account is not None and self._engine is not None:
            control = self._engine.control
            resumed = control is not None and bool(control.welcome.resume)
            away = max(0.0, time.time() - state_dict["at"]) if resumed else 0.0
            self._account.load_state(state_dict, time.perf_counter(), away)

    def metrics(self, now: float) -> dict[str, float]:
        """Return the logged metrics, at time.perf_counter() ``now``."""
        assert self._account is not None
        account = self._account
        since_start = {
            "train_seconds": account.train,
            "lost_seconds": account.lost,
            "other_seconds": account.other,
            "goodput": account.goodput(now),
        }
        return {**self._rates(), **since_start}

    def _count(self, batch: GlobalBatch, seconds: float, world: int) -> None:
        self._training_seconds += max(seconds, 1e-9)
        self._steps += 1
        self._samples += batch.num_samples()
        self._micro_batches.append(len(batch.micro_batches))
        self._worlds.append(world)
        flops = None if self._flops is None else int(self._flops)
        self._window.update(time=self._training_seconds, batches=self._steps, samples=self._samples, flops=flops)

    def _rates(self) -> dict[str, float]:
        found = self._window.compute()
        if "device/batches_per_sec" not in found:
            return {}
        steps = float(found["device/batches_per_sec"])
        rates = {
            "steps_per_sec": steps,
            "micro_batches_per_sec": steps * _mean_of_later(self._micro_batches),
            "samples_per_sec": float(found["device/samples_per_sec"]),
        }
        if "device/flops_per_sec" in found:
            flops = float(found["device/flops_per_sec"])
            rates["tflops_per_sec"] = flops / 1e12
            if self._available_flops:
                rates["mfu"] = flops / (self._available_flops * _mean_of_later(self._worlds))
        return rates


def _mean_of_later(window: deque[int]) -> float:
    """Return the mean over the steps between the first end and the last: all but the first."""
    return (sum(window) - window[0]) / (len(window) - 1)
