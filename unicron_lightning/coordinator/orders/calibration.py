"""Calibration: a task runs at chosen sizes for some steps each, so that the plan knows its speed there.

An operator orders the sizes. The coordinator carries the order out by itself: it resizes the task to one size after the
other, and after the last one the operator's earlier size, or none, is in force again. So the end of the command that
gave the order, or of the coordinator, leaves nothing behind: the order is part of the task's state.

While a size is measured it is the task's minimum and maximum, and the task is not paused: other tasks have to release
places for it, but none falls below its own minimum. A size is skipped if the places do not suffice for that, or if it
is not measured in time. `unicron resize` ends a calibration, as does the end of the task.

Measured speeds are those that the planner uses anyway (`incidents.accounting`). A size counts once enough steps were
finished in one epoch, without a change of layout in progress.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.actions import Part, Turn, on
from unicron_lightning.coordinator.allocation.places import Places, competing_tasks, usable_places
from unicron_lightning.coordinator.incidents import accounting
from unicron_lightning.coordinator.state import Agent, CalibrationOrder, Cluster, Task
from unicron_lightning.wire.fields import counted

STOPPED: Final = "stopped by order"


def sizes_of(cluster: Cluster, task: Task) -> list[int]:
    """Return the sizes that are measured by default: the smallest one, its doubles, and the largest one possible."""
    places = usable_places(cluster)
    step, low = task.granularity, task.min_nodes
    able = [n for n in range(-(-low // step) * step, task.max_nodes + 1, step) if not _lack(cluster, task, n, places)]
    doubles = [n for n in able if n == able[0] << (n // able[0]).bit_length() - 1]
    return sorted({*doubles, *able[-1:]})


def refusal(cluster: Cluster, task: Task, sizes: Sequence[int]) -> str | None:
    """Return why a task cannot be calibrated at these sizes now, for the operator; None if it can."""
    if task.calibration is not None and task.calibration.size is not None:
        return f"task {task.id!r} is calibrated already: {shown(task)}"
    if not task.elastic or task.finishing:
        doing = "ends" if task.finishing else "has not begun to train, or is of a script without the strategy"
        return f"task {task.id!r} {doing}"
    if not sizes or len(set(sizes)) < len(sizes):
        return f"sizes={','.join(map(str, sizes))}: expected different numbers of nodes"
    places = usable_places(cluster)
    lacks = (f"sizes={size}: {lack}" for size in sizes if (lack := _lack(cluster, task, size, places)))
    return next(lacks, None)


def order(task: Task, turn: Turn, event: ev.Calibrate) -> None:
    """Begin a calibration that `refusal` has accepted, or stop the present one if the order names no sizes."""
    if not event.sizes:
        stop(task, turn, STOPPED)
        return
    task.calibration = CalibrationOrder(
        sizes=list(event.sizes),
        steps=event.steps,
        seconds=event.seconds,
        before=task.target,
        begun=turn.now,
        since=turn.now,
    )
    turn.emit_apart(task, "calibration_begins", nodes=list(event.sizes), steps=event.steps)
    _begin(task, turn, task.calibration)


def stop(task: Task, turn: Turn, reason: str) -> None:
    """End a calibration, if there is one, before all its sizes are measured."""
    if task.calibration is not None and task.calibration.size is not None:
        _end(task, turn, task.calibration, reason)


def check(cluster: Cluster, turn: Turn, places: Places, tasks: Sequence[Task]) -> None:
    """Skip sizes for which the places no longer suffice, before a plan is made."""
    for task in tasks:
        calibration = task.calibration
        while calibration is not None and calibration.size is not None:
            if (lack := _lack(cluster, task, calibration.size, places)) is None:
                break
            _skip(task, turn, calibration, lack)


def shown(task: Task) -> str:
    """Describe the calibration in progress for users; "" if there is none."""
    calibration = task.calibration
    if calibration is None or calibration.size is None:
        return ""
    then = [str(size) for size in calibration.sizes[calibration.place + 1 :]]
    return f"calibration at {counted(calibration.size, 'node')}" + (f", then {', '.join(then)}" if then else "")


def plain(task: Task) -> dict[str, Any] | None:
    """Return the newest calibration with its measurements as plain JSON; None if there was none."""
    calibration = task.calibration
    if calibration is None:
        return None
    done = [size for size in calibration.sizes[: calibration.place] if size not in calibration.skipped]
    speeds = {size: speed for size in done if (speed := task.measured.speeds.get(size)) is not None}
    return {
        "since": calibration.begun,
        "size": calibration.size,
        "doing": shown(task),
        "ended": calibration.ended,
        "skipped": {str(size): reason for size, reason in calibration.skipped.items()},
        "measured": [
            {
                "nodes": size,
                "workers": speed.workers,
                "step_seconds": speed.seconds,
                "relative_error": round(max(speed.spread, 0.001) / speed.intervals**0.5, 6),
            }
            for size, speed in sorted(speeds.items())
        ],
    }


def _lack(cluster: Cluster, task: Task, size: int, places: Places) -> str | None:
    """Return why the task cannot have this size although no other task falls below its minimum; None if it can."""
    if not task.min_nodes <= size <= task.max_nodes or size % task.granularity:
        of = f", in multiples of {task.granularity}" if task.granularity > 1 else ""
        return f"expected {task.min_nodes} to {task.max_nodes} nodes{of}"
    others = [other for other in competing_tasks(cluster) if other is not task]
    if task not in competing_tasks(cluster):
        usable, needed = len([agent for agent in task.agents.values() if not cluster.lasting.excludes(agent)]), 0
    else:
        jobs = cluster.lasting.jobs
        kept = [each for each in others if each.slots and not ((job := jobs.get(each.id)) and job.may_pause)]
        usable, needed = places.able[task.id], sum(other.min_nodes for other in kept)
    if size + needed > usable:
        return f"usable: {counted(usable, 'node')}" + (f", other tasks need {needed}" if needed else "")
    return None


def _begin(task: Task, turn: Turn, calibration: CalibrationOrder) -> None:
    """Give the task the present size."""
    task.target, calibration.since, calibration.epoch = calibration.size, turn.now, 0
    turn.timer("calibration", calibration.seconds, task=task.id)
    _changed(task, turn)


def _skip(task: Task, turn: Turn, calibration: CalibrationOrder, reason: str) -> None:
    assert calibration.size is not None
    calibration.skipped[calibration.size] = reason
    turn.emit_apart(task, "calibration_skips", nodes=calibration.size, reason=reason)
    _next(task, turn, calibration)


def _next(task: Task, turn: Turn, calibration: CalibrationOrder) -> None:
    calibration.place += 1
    if calibration.size is None:
        _end(task, turn, calibration, "")
    else:
        _begin(task, turn, calibration)


def _end(task: Task, turn: Turn, calibration: CalibrationOrder, reason: str) -> None:
    calibration.sizes, calibration.ended = calibration.sizes[: calibration.place], reason
    task.target = calibration.before
    turn.cancel("calibration", task=task.id)
    turn.emit_apart(task, "calibration_ends", reason=reason, skipped=sorted(calibration.skipped))
    _changed(task, turn)


def _changed(task: Task, turn: Turn) -> None:
    turn.places_changed = True
    turn.to_review[task.id] = task
    turn.save(task)


def _progressed(task: Task, turn: Turn, _agent: Agent, _message: wire.Progress) -> None:
    """Go to the next size once enough steps were finished with this one."""
    calibration, pace = task.calibration, task.measured.pace
    if calibration is None or calibration.size != pace.level.slots or pace.stands or not pace.worker:
        return
    if task.layouts.ordered is not None or task.layouts.untried:
        return
    if calibration.epoch != pace.epoch:
        calibration.epoch, calibration.first = pace.epoch, pace.step
    if pace.step - calibration.first >= calibration.steps and accounting.is_enough(pace):
        accounting.record_speed(task, turn, pace)
        turn.emit_apart(task, "calibration_measured", nodes=calibration.size, step_seconds=pace.median)
        _next(task, turn, calibration)


def _timed_out(task: Task, turn: Turn) -> None:
    calibration = task.calibration
    if calibration is not None and calibration.size is not None:
        _skip(task, turn, calibration, f"not measured within {calibration.seconds:g} s")


def _restore(task: Task, turn: Turn) -> None:
    calibration = task.calibration
    if calibration is not None and calibration.size is not None:
        left = calibration.since + calibration.seconds - turn.now
        turn.timer("calibration", min(max(left, 0.0), calibration.seconds), task=task.id)


PART: Final = Part(restore=_restore, receivers=(on(wire.Progress, _progressed),), timers={"calibration": _timed_out})
