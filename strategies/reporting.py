"""What a finished step tells the coordinator."""

from __future__ import annotations

import math
from typing import Any

from unicron_lightning import wire
from unicron_lightning.errors import ConfigError
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.step import GradientStep

_FIRST_STEP: dict[wire.EpochKind, str] = {
    "init": "started",
    "restart": "started",
    "fail": "recovered",
    "join": "grown",
    "leave": "shrunk",
}
"""What the first step finished in an epoch means, as an event."""


def told_flops(module: Any) -> float | None:
    """The module's attribute ``flops_per_step``, if any: FLOPs of the model in one optimizer step of the whole task.

    Raises:
        ConfigError: it is no number above 0.
    """
    told = getattr(module, "flops_per_step", None)
    if told is None:
        return None
    if isinstance(told, bool) or not isinstance(told, int | float) or not 0 < told < math.inf:
        raise ConfigError(f"{type(module).__qualname__}.flops_per_step={told!r}: expected FLOPs, a finite number > 0")
    return float(told)


def report_step(engine: Engine, operation: GradientStep, loss: float, reported_epoch: int) -> int:
    """Counts the step, leaves word of progress, and tells the event log if it is the first of its epoch.

    Args:
        engine: of this worker.
        operation: the step, committed.
        loss: mean over the global batch.
        reported_epoch: the epoch told of last.

    Returns:
        The epoch told of last, now.
    """
    world = engine.world
    engine.step += 1
    if engine.control is None:
        return reported_epoch
    engine.control.progress(engine.step, {"loss": loss})
    if world.epoch != reported_epoch:
        engine.control.event(
            _FIRST_STEP[world.kind],
            epoch=world.epoch,
            step=engine.step,
            world=world.size,
            recomputed=operation.recomputed,
        )
    return world.epoch
