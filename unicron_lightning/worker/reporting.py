"""A worker's reports to the coordinator: finished steps, errors, and changes of the ranks' shares."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from unicron_lightning import wire
from unicron_lightning.detection.exceptions import describe
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


class StepReports:
    """Reports each finished step."""

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


def report_error(control: Control | None, error: BaseException, engine: Engine) -> None:
    """Report an exception that ends this worker."""
    step, activity = engine.step, engine.activity
    if control is None or not isinstance(error, Exception):
        return
    if isinstance(error, ParametersDiffer) and error.stops:
        # Not `ends`: the coordinator must stop the task, and not replace this worker.
        control.report("parameters_differ", str(error), phase="commit", step=step, details={})
        return
    told = describe(error)
    phase = told.phase if told.phase in BETWEEN else activity.now.phase  # a hook may be called anywhere
    first = phase in BETWEEN and phase not in activity.passed
    details = {**told.details, "first": True} if first else told.details
    control.report(told.kind, told.cause, phase=told.phase, step=step, details=details, ends=True)
