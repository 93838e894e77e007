"""Measurement of running tasks: step times by size, transitions, and run times until failure.

Step times come from `wire.Progress`, which every worker sends once a second. Members step together, so the reports of
one worker are enough: the first to finish a step in the epoch. An interval is the time between two of its reports,
divided by the steps between them. The median of the newest intervals counts, so validation, checkpoints and stalls do
not distort it.

The measurement restarts with each settled epoch, after its first step, which contains the transition.
Everything else comes from the events of the task's log, as they are emitted.
"""

from __future__ import annotations

import statistics
from typing import Final

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.actions import Turn
from unicron_lightning.coordinator.incidents.facts import (
    AgentLoss,
    EpochPublished,
    EpochSettled,
    FirstStep,
    LifeBegun,
    SlotGrant,
    TaskEnd,
    WorkerDeath,
    is_failure,
)
from unicron_lightning.coordinator.incidents.record import (
    Level,
    Measured,
    MeasuredTransition,
    Speed,
    SpeedMeasurement,
    TransitionName,
)
from unicron_lightning.coordinator.part import Part
from unicron_lightning.coordinator.state import Task

_WINDOW: Final = 32
"""Number of intervals whose median is taken."""
_LEAST: Final = 3
_FIRM: Final = 8
"""Number of intervals that outweigh an earlier measurement of a size."""
_NOISE: Final = 0.03
"""Relative change below which a measurement is ignored, so that plans made ahead stay valid."""
_TO_DEVIATION: Final = 1.4826
"""Ratio of the standard deviation to the median absolute deviation of a normal distribution."""
_SIZES_KEPT: Final = 64
_TRANSITIONS_KEPT: Final = 64


def progressed(task: Task, turn: Turn, message: wire.Progress) -> bool:
    """Record a worker's newest step; return whether it is the first one reported in the epoch."""
    measured = task.measured
    if message.flops_per_step is not None and message.flops_per_step != measured.flops_per_step:
        measured.flops_per_step = message.flops_per_step
        turn.save(task)
    pace = measured.pace
    others = pace.worker not in ("", message.worker)
    if pace.stands or not pace.epoch or others or message.step <= pace.step:
        return False
    at = turn.now if message.at is None else message.at
    seconds = (at - pace.at) / (message.step - pace.step)
    first = not pace.worker
    pace.worker, pace.step, pace.at = message.worker, message.step, at
    if not first and seconds > 0:  # clocks may be set back
        pace.seconds = [*pace.seconds, seconds][-_WINDOW:]
        _conclude(task, turn, pace)
    return first


def record_event(task: Task, turn: Turn, event: ev.Emit) -> None:
    """Process an event of the task's log."""
    measured = task.measured
    match event.fact:
        case EpochPublished(kind=kind) if kind not in wire.PLANNED:
            measured.pace.stands = True
            measured.begun = measured.begun or turn.now  # otherwise a failure during a transition
        case EpochSettled() as settled:
            _settled(task, turn, settled)
        case LifeBegun():
            measured.begun = 0.0
            _resize(measured, turn, Level(slots=0, workers=0))
        case SlotGrant() if task.life > 1 and task.epoch is None:
            measured.begun = measured.begun or turn.now
        case WorkerDeath() as death if is_failure(death):
            measured.lifetimes.workers_lost += 1
        case AgentLoss(agent=agent) if any(worker.startswith(f"{agent}/") for worker in task.established):
            measured.lifetimes.slots_lost += 1
        case TaskEnd():
            _resize(measured, turn, Level(slots=0, workers=0))
            _keep_lifetimes(measured, turn)
        case FirstStep(epoch=epoch, transition=transition) if epoch == measured.pace.epoch:
            _stepped(task, turn, transition)


def _settled(task: Task, turn: Turn, epoch: EpochSettled) -> None:
    measured = task.measured
    slots = {worker.rpartition("/")[0] for worker in task.established}
    level = Level(slots=len(slots), workers=len(task.established))
    steps = [task.workers[worker].step for worker in task.established if worker in task.workers]
    before = measured.level
    _resize(measured, turn, level)
    if epoch.kind in wire.PLANNED:
        measured.begun = turn.now
    measured.pace = SpeedMeasurement(epoch=epoch.number, level=level, before=before, step=max(steps, default=0))


def _stepped(task: Task, turn: Turn, kind: TransitionName) -> None:
    """Record the first finished step of the newest settled epoch; all its members report it."""
    measured = task.measured
    begun, measured.begun = measured.begun, 0.0
    pace = measured.pace
    in_place = kind == "shrink_in_place" and pace.level.workers >= pace.before.workers
    if not begun or in_place or (kind == "restart" and task.life == 1):
        return  # reported already; or no worker was lost, as after a broken connection; or the task's start
    seen = MeasuredTransition(kind=kind, seconds=max(turn.now - begun, 1e-3), at=turn.now)
    measured.transitions = [*measured.transitions, seen][-_TRANSITIONS_KEPT:]
    turn.save(task)


def _resize(measured: Measured, turn: Turn, level: Level) -> None:
    """Record the size that runs from now on."""
    seconds = max(0.0, turn.now - measured.since) if measured.since else 0.0
    measured.lifetimes.slot_seconds += measured.level.slots * seconds
    measured.lifetimes.worker_seconds += measured.level.workers * seconds
    measured.level, measured.since = level, turn.now


def _keep_lifetimes(measured: Measured, turn: Turn) -> None:
    """Keep the ended task's run times and failures for the cluster's statistics."""
    own, past = measured.lifetimes, turn.lasting.lifetimes
    for name in own.__struct_fields__:
        setattr(past, name, getattr(past, name) + getattr(own, name))
    measured.lifetimes = type(own)()
    turn.save_lasting()


def _conclude(task: Task, turn: Turn, pace: SpeedMeasurement) -> None:
    """Record the step time of this size, if there are enough measurements and it has changed."""
    number, known = len(pace.seconds), task.measured.speeds.get(pace.level.slots)
    if known is not None and known.workers != pace.level.workers:
        known = None
    if number < _LEAST or (known is not None and number < min(_FIRM, known.intervals)):
        return
    median = statistics.median(pace.seconds)
    if known is not None and abs(median / known.seconds - 1) <= _NOISE and number < 2 * known.intervals:
        return
    spread = _TO_DEVIATION * statistics.median(abs(seconds / median - 1) for seconds in pace.seconds)
    speed = Speed(workers=pace.level.workers, seconds=median, spread=spread, intervals=number, at=turn.now)
    speeds = {**task.measured.speeds, pace.level.slots: speed}
    if len(speeds) > _SIZES_KEPT:
        del speeds[min(speeds, key=lambda slots: speeds[slots].at)]
    task.measured.speeds = speeds
    turn.save(task)


PART: Final = Part(record=record_event)
