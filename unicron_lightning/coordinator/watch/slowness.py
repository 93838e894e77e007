"""Detection of tasks that have become slower than before, and of ranks that delay the others.

Both use statistics that members report with their progress (`wire.Pace`): the median of the last steps, so that a
change takes a while to show. A verdict requires that it persists for `degraded_time`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from unicron_lightning.coordinator.actions import Turn
from unicron_lightning.coordinator.state import Task


def progressed(task: Task, turn: Turn, worker: str) -> None:
    """Handle a member's report of its pace. The first member's report triggers the review of all."""
    if task.settled and task.established and task.established[0] == worker:
        _look_at_steps(task, turn, worker)
        _look_at_ranks(task, turn)


def behind(busy: Mapping[str, float], factor: float) -> dict[str, float]:
    """Select members whose micro-batches take more than ``factor`` times their peers' median, with that ratio."""
    found = {}
    for name, seconds in busy.items():
        peers = [other for peer, other in busy.items() if peer != name]
        if peers and (usual := statistics.median_low(peers)) > 0 and seconds > factor * usual:
            found[name] = round(seconds / usual, 2)
    return found


def _look_at_steps(task: Task, turn: Turn, worker: str) -> None:
    watch, pace, limits = task.watch, task.workers[worker].pace, turn.limits
    slow = pace is not None and pace.slowdown > limits.watch.degraded_factor
    if not slow:
        watch.slow_since = 0.0
        if watch.degraded:
            watch.degraded = False
            turn.emit_apart(task, "task_normal", step=task.workers[worker].step)
        return
    assert pace is not None
    watch.slow_since = watch.slow_since or turn.now
    if not watch.degraded and turn.now - watch.slow_since >= limits.degraded_time:
        watch.degraded = True
        turn.emit_apart(
            task,
            "task_degraded",
            step=task.workers[worker].step,
            times=round(pace.slowdown, 2),
            step_seconds=pace.median,
            usual_seconds=pace.usual,
            since=watch.slow_since,
        )


def _look_at_ranks(task: Task, turn: Turn) -> None:
    watch, limits = task.watch, turn.limits
    paces = {name: task.workers[name].pace for name in task.established if name in task.workers}
    busy = {name: pace.busy for name, pace in paces.items() if pace is not None and pace.busy is not None}
    late = behind(busy, limits.straggler_factor)
    watch.behind = {name: watch.behind.get(name, turn.now) for name in late}
    measured = busy.keys() | (watch.stragglers.keys() - paces.keys())  # not members in first steps
    for name in [name for name in watch.stragglers if name not in late and name in measured]:
        del watch.stragglers[name]
        turn.emit_apart(task, "straggler_over", worker=name)
    for name, since in watch.behind.items():
        if turn.now - since < limits.degraded_time:
            continue
        if name not in watch.stragglers:
            node = task.agents[task.workers[name].agent].node
            about = {"micro_batch_seconds": busy[name], "times": late[name], "since": since}
            turn.emit_apart(task, "straggler", worker=name, rank=task.rank_of(name), node=node, **about)
        watch.stragglers[name] = late[name]
