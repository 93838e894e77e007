"""Reports to the coordinator: finished steps and exceptions, the latter before the trainer's hooks for them."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from typing import Any

from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.utilities.exceptions import SIGTERMException, _TunerExitException
from typing_extensions import override

from unicron_lightning import wire
from unicron_lightning.detection.exceptions import describe
from unicron_lightning.detection.exits import LEFT_EARLY
from unicron_lightning.errors import ConfigError
from unicron_lightning.worker.agreement import ParametersDiffer
from unicron_lightning.worker.control.activity import BETWEEN
from unicron_lightning.worker.control.thread import Control
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.rows import Balance
from unicron_lightning.worker.step import Step

_FIRST_STEP: dict[wire.EpochKind, str] = {
    "init": "started",
    "restart": "started",
    "fail": "recovered",
    "join": "grown",
    "leave": "shrunk",
}
"""Event of the first step finished in an epoch, by kind."""


def told_flops(module: Any) -> float | None:
    """Return the module's attribute ``flops_per_step``, if any: FLOPs of one optimizer step of the whole task.

    Raises:
        ConfigError: it is no number above 0.
    """
    told = getattr(module, "flops_per_step", None)
    if told is None:
        return None
    if isinstance(told, bool) or not isinstance(told, int | float) or not 0 < told < math.inf:
        raise ConfigError(f"{type(module).__qualname__}.flops_per_step={told!r}: expected FLOPs, a finite number > 0")
    return float(told)


class StepReports:
    """Reports each finished step, and the error that ends the worker."""

    def __init__(self) -> None:
        self._epoch = 0
        """Newest reported epoch."""
        self._finite = True

    def finished(self, engine: Engine, operation: Step[Any], loss: float | None, num_samples: int) -> None:
        """Count the step, report progress, and log an event if it is the first of its epoch.

        Args:
            engine: this worker's engine.
            operation: the step, committed.
            loss: mean over the global batch, the same on all ranks; None if no micro-batch had one.
            num_samples: data set items in the global batch.
        """
        world, control = engine.world, engine.control
        engine.step += 1
        engine.activity.committed(engine.step)
        was_finite, self._finite = self._finite, loss is None or math.isfinite(loss)
        if control is None:
            return
        control.progress(engine.step, {} if loss is None else {"loss": loss}, num_samples)
        if was_finite and not self._finite and world.rank == 0:
            control.report("nan_loss", f"the loss is {loss}", phase="commit", step=engine.step, details={})
        if world.epoch != self._epoch:
            self._epoch = world.epoch
            control.event(
                _FIRST_STEP[world.kind],
                epoch=world.epoch,
                step=engine.step,
                world=world.size,
                recomputed=operation.recomputed,
            )


def report_exception(control: Control | None, error: BaseException, engine: Engine) -> None:
    """Report an exception that Lightning is about to raise out of the trainer; orders to end are no errors."""
    step, activity = engine.step, engine.activity
    if isinstance(error, SIGTERMException):
        # Lightning raises it without a status; a worker that ends with 0 would have finished the task.
        error.code = 128 + signal.SIGTERM
    elif control is not None and isinstance(error, SystemExit) and error.code in (None, 0):
        cause = (
            f"the script left by SystemExit({error.code!r}) in the middle of a run, after step {step}; expected the "
            "trainer to end the run, e.g. by trainer.should_stop=True"
        )
        error.code = LEFT_EARLY
        control.report("other_software_error", cause, phase="script", step=step, details={}, ends=True)
    elif control is not None and isinstance(error, ParametersDiffer) and error.stops:
        # Not `ends`: the coordinator must stop the task, and not replace this worker.
        control.report("parameters_differ", str(error), phase="commit", step=step, details={})
    elif control is not None and isinstance(error, Exception):
        told = describe(error)
        phase = told.phase if told.phase in BETWEEN else activity.now.phase  # a hook may be called anywhere
        first = phase in BETWEEN and phase not in activity.passed
        details = {**told.details, "first": True} if first else told.details
        control.report(told.kind, told.cause, phase=told.phase, step=step, details=details, ends=True)


def balance_of(engine: Engine, micro_batches: Callable[[], int]) -> Balance:
    """Return the shares of an engine's steps by speed; the first rank reports each change.

    Args:
        engine: runs the steps.
        micro_batches: returns M of the present epoch's steps.
    """

    def changed(counts: list[int], seconds: list[float]) -> None:
        if engine.control is not None and engine.world.rank == 0:
            taken = [round(value, 6) for value in seconds]
            engine.control.event("rebalanced", shares=counts, micro_batch_seconds=taken, step=engine.step)

    return Balance(micro_batches, lambda: engine.world.epoch, changed)


class RunLauncher(_Launcher):
    """Calls the trainer's functions in this process.

    Lightning tells a strategy of an error after it has called the callbacks' ``on_exception``, which may write a
    checkpoint for minutes. The peers should not wait so long, and the agent should know that this worker still writes.

    Args:
        failed: called with an error at once.
    """

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return True

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("trainer", None)
        try:
            return function(*args, **kwargs)
        except _TunerExitException:  # the regular end of a search
            raise
        except BaseException as error:
            self._failed(error)
            raise

    @override
    def kill(self, signum: Any) -> None:
        """Do nothing: it has started no process."""
