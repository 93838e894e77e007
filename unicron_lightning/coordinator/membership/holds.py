"""Ends a task that holds below its minimum of nodes for too long, or that nothing can lead out of its hold.

A task holds while it has fewer nodes than its minimum: its members wait at a step boundary for another one. The time
counts until `soon_steps` steps are finished in a row, since a worker that fails at its start does not end the hold. A
task that trains when the time is over, as one with long steps, ends only if it holds again without a further step.
"""

from __future__ import annotations

from typing import Final

from unicron_lightning.coordinator.actions import Turn
from unicron_lightning.coordinator.membership import epochs
from unicron_lightning.coordinator.orders import jobs
from unicron_lightning.coordinator.part import Part
from unicron_lightning.coordinator.severity.record import EQUAL_FAILURES
from unicron_lightning.coordinator.state import Task


def review(task: Task, turn: Turn) -> None:
    """Start and end the time of a hold; end a task whose only other node fails again and again. Idempotent."""
    if not _holds(task):
        if task.held is not None:
            _follow(task, turn, *task.held)
        return
    if task.held is None or (task.committed > task.held[1] and turn.now >= task.held[0] + turn.limits.hold_timeout):
        task.held = turn.now, task.committed
        turn.timer("hold", turn.limits.hold_timeout, task=task.id)
        turn.save(task)
    task.held = task.held[0], task.committed
    _due(task, turn)
    if _holds(task) and not task.finishing and not jobs.is_job(task, turn):
        _end_if_alone(task, turn)


def _holds(task: Task) -> bool:
    return task.over is None and task.epoch is not None and task.epoch.hold and task.settled


def _follow(task: Task, turn: Turn, since: float, step: int) -> None:
    """End the time of a hold, if the task has trained for some steps after it, or is over."""
    if task.over is not None or task.committed - step >= turn.limits.soon_steps:
        task.held = None
        turn.cancel("hold", task=task.id)
        turn.save(task)
    elif task.settled and task.committed < step:  # resumed from a checkpoint
        task.held = since, task.committed


def _end_if_alone(task: Task, turn: Turn) -> None:
    """End a task that can only get a node whose new workers have all failed in one way.

    A node that has left is not waited for; another one may be repaired while it tries again. An exception of the
    program that it raises at each try is not: its script or its settings differ.
    """
    inside, last = {member.agent for member in task.members()}, task.severity.latest
    if not last or len({(failure.node, failure.cause) for failure in last}) > 1 or last[-1].kind == "lost_connection":
        return
    node = last[-1].node
    outside = {agent.node for agent in task.agents.values() if agent.id not in inside}
    where, tries = ("left", EQUAL_FAILURES) if not outside else ("there", turn.limits.crash_attempts)
    series = task.severity.series.get(node)
    if series is None or len(last) < EQUAL_FAILURES or len(series.times) < tries:
        return
    if not outside or (outside == {node} and last[-1].place):
        _end(task, turn, f"no other node is {where}, and {node} fails in one way: {len(series.times)} times in a row")


def restore(task: Task, turn: Turn) -> None:
    """Set the timer again after a restart of the coordinator."""
    if task.held is not None:
        turn.timer("hold", max(0.0, task.held[0] + turn.limits.hold_timeout - turn.now), task=task.id)


def _due(task: Task, turn: Turn) -> None:
    if task.held is not None and turn.now >= task.held[0] + turn.limits.hold_timeout and _holds(task):
        _end(task, turn, f"for {turn.now - task.held[0]:.0f} s (severity.hold_timeout)")


def _end(task: Task, turn: Turn, why: str) -> None:
    last = f"; the {task.severity.last_words}" if task.severity.latest else ""
    reason = f"held below the minimum of {task.min_nodes} nodes: {why}{last}"
    epochs.stop(task, turn, rule="held below the minimum", reason=reason)


PART: Final = Part(restore=restore, timers={"hold": _due}, review=review)
