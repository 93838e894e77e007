"""Jobs: tasks that were submitted, from the queue to their end.

A job is a `Task` from its submission on. While no agent runs it, it waits (`Task.absent`): at the beginning, and
after all its nodes are lost. It fails when torchrun exhausts its restarts on the last node, when its time limit is
reached, or when a task that it comes after does not succeed. Before all of these have succeeded it is a held job
(`Lasting.held`) and competes for no place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from unicron_lightning import wire
from unicron_lightning.coordinator import lifecycle
from unicron_lightning.coordinator.actions import Part, Turn
from unicron_lightning.coordinator.incidents.facts import TaskEnd
from unicron_lightning.coordinator.lifecycle import Lifecycle
from unicron_lightning.coordinator.state import Cluster, JobResult, Lasting, Task
from unicron_lightning.jobs import Job
from unicron_lightning.wire.fields import shortened

EndState = Literal["succeeded", "failed", "cancelled"]
JobState = Literal["queued", "running", EndState]

CANCELLED: Final = "cancelled"
"""Reason of a task's end by order; also its beginning, if a checkpoint was written first."""
_RESULTS_KEPT: Final = 500
_SUBMISSIONS_APART: Final = 1e-6
"""[s] between the times of jobs that are submitted together, which order the queue."""


def refusal(cluster: Cluster, jobs: Sequence[Job]) -> str | None:
    """Return why jobs that are submitted together are refused now, for their user; None if they are accepted."""
    together: set[str] = set()
    for job in jobs:
        reason = _refusal(cluster, job, together)
        if reason is not None:
            return reason
        together.add(job.name)
    return None


def _refusal(cluster: Cluster, job: Job, together: set[str]) -> str | None:
    task = cluster.tasks.get(job.name)
    if job.name in together:
        return f"name={job.name!r} is submitted twice: expected different names"
    if task is not None and task.over is None:
        return f"task {job.name!r} exists already: expected another name, or that it is cancelled first"
    if task is not None:
        return f"agents of an earlier task {job.name!r} have not ended yet: try again in a moment"
    for name in job.after:
        if name in together or _runs(cluster, name):
            continue
        result = result_of(cluster.lasting, name)
        if result is None:
            running = sorted(task.id for task in cluster.tasks.values() if task.over is None)
            return f"after={shortened(name)}: no such task; expected one that has succeeded, or one of {running}"
        if result.state != "succeeded":
            return f"after={shortened(name)}: expected a task that runs or has succeeded; it has {_how(result.state)}"
    return None


def _runs(cluster: Cluster, name: str) -> bool:
    task = cluster.tasks.get(name)
    return task is not None and task.over is None


def _how(state: str) -> str:
    return "been cancelled" if state == "cancelled" else state


def submit(cluster: Cluster, turn: Turn, jobs: Sequence[Job]) -> None:
    """Accept jobs that are submitted together, in this order; the caller has checked `refusal`."""
    for number, given in enumerate(jobs):
        job = msgspec.structs.replace(given, submitted_at=turn.now + number * _SUBMISSIONS_APART)
        awaited = [name for name in job.after if _runs(cluster, name)]
        if awaited:
            turn.lasting.held[job.name] = awaited
        adopt(cluster, turn, job, created_at=job.submitted_at)
        about = {"command": job.command, "weight": job.weight, "after": awaited}
        turn.emit_apart(cluster.tasks[job.name], "job_submitted", **about)


def adopt(cluster: Cluster, turn: Turn, job: Job, *, created_at: float) -> None:
    """Record a job, and create its task if no agent runs it yet."""
    cluster.lasting.jobs[job.name] = job
    if job.name not in cluster.tasks:
        cluster.tasks[job.name] = Task(
            id=job.name,
            min_nodes=job.min_nodes,
            max_nodes=job.max_nodes,
            created_at=created_at,
            weight=job.weight,
            lifecycle=Lifecycle(agents="absent"),
        )
        turn.save(cluster.tasks[job.name])
    turn.save_lasting()
    turn.places_changed = True


def is_job(task: Task, turn: Turn) -> bool:
    """Whether the task was submitted, so that nodes' daemons run it."""
    return task.id in turn.lasting.jobs


def saved(task: Task) -> str:
    """Return the part of a task's last reason that names its newest checkpoint, and how a new task resumes from it."""
    newest = task.checkpoint
    if newest is None:
        return ""
    return f"; step {newest.step} is saved in {newest.path}; to resume, give this path to trainer.fit(ckpt_path=...)"


def finish(task: Task, turn: Turn, *, succeeded: bool, reason: str, interrupted: bool = False) -> None:
    """End a task, submitted or not, and notify all its agents.

    Args:
        task: not over yet.
        turn: the present one.
        succeeded: whether its work is done.
        reason: for its user.
        interrupted: whether its user ended it, in another way than by `CANCELLED`.
    """
    lifecycle.move(task, over=succeeded)
    cancelled = interrupted or reason.startswith(CANCELLED)
    ended(task, turn, state="cancelled" if cancelled else "succeeded" if succeeded else "failed", reason=reason)
    for agent in task.agents.values():
        turn.send(agent, wire.TaskOver(succeeded=succeeded, reason=reason))
    turn.log(task, TaskEnd(succeeded=succeeded, reason=reason, life=task.life, epoch=task.number))


def ended(task: Task, turn: Turn, *, state: EndState, reason: str) -> None:
    """Record how a task, submitted or not, has ended, and release or end the jobs that come after it."""
    lasting = turn.lasting
    lasting.held.pop(task.id, None)
    job = lasting.jobs.pop(task.id, None)
    result = JobResult(
        name=task.id,
        state=state,
        reason=reason,
        managed=job is not None,
        submitted_at=job.submitted_at if job else task.created_at,
        ended_at=turn.now,
    )
    lasting.results = [*(each for each in lasting.results if each.name != task.id), result][-_RESULTS_KEPT:]
    turn.save_lasting()
    turn.places_changed = True
    _release(result, turn)


def _release(result: JobResult, turn: Turn) -> None:
    held = turn.lasting.held
    for name in [name for name, awaited in held.items() if result.name in awaited]:
        held[name] = [each for each in held[name] if each != result.name]
        if not held[name] or result.state != "succeeded":
            del held[name]
        if result.state != "succeeded" and (task := turn.tasks.get(name)) is not None and task.over is None:
            why = f"it comes after task {result.name}, which has {_how(result.state)}"
            finish(task, turn, succeeded=False, reason=why)
            turn.to_review[name] = task


def result_of(lasting: Lasting, name: str) -> JobResult | None:
    """Return how the newest task of that name ended; None if it has not ended or is no longer recorded."""
    return next((result for result in reversed(lasting.results) if result.name == name), None)


def job_status(cluster: Cluster, name: str) -> dict[str, Any] | None:
    """Describe a job, or a task, as plain JSON; None if it is not known.

    ``state`` is one of `JobState`.
    """
    task, job = cluster.tasks.get(name), cluster.lasting.jobs.get(name)
    if task is not None and task.over is None:
        state: JobState = "running" if task.slots else "queued"
        submitted_at = job.submitted_at if job else task.created_at
        return {"name": name, "state": state, "reason": None, "submitted_at": submitted_at, "ended_at": None,
                "managed": job is not None}  # fmt: skip
    result = result_of(cluster.lasting, name)
    return None if result is None else msgspec.structs.asdict(result)


def listed(
    cluster: Cluster, since: float, describe: Callable[[Cluster, str], dict[str, Any] | None] = job_status
) -> list[dict[str, Any]]:
    """Describe all known jobs and tasks that had not ended before ``since``, ended ones first."""
    names = dict.fromkeys([*(result.name for result in cluster.lasting.results), *cluster.tasks])
    found = [status for name in names if (status := describe(cluster, name)) is not None]
    return [status for status in found if status["ended_at"] is None or status["ended_at"] >= since]


def recent(closed: Iterable[Mapping[str, Any]], cluster: Cluster, started_at: float) -> list[Mapping[str, Any]]:
    """Select the log's closed incidents that belong to the coordinator that started at ``started_at``.

    A task belongs to it from the task's own beginning, if it has not ended before, else from the coordinator's.
    """
    begins = {status["name"]: min(started_at, status["submitted_at"]) for status in listed(cluster, started_at)}
    return [each for each in closed if each["fields"]["fault_at"] >= begins.get(each["task"] or "", started_at)]


# ---- time limits -----------------------------------------------------------------------------------------------------


def _limit(task: Task, turn: Turn) -> float | None:
    """Return the seconds left to a job that has started and has a time limit; None for other tasks."""
    job = turn.lasting.jobs.get(task.id)
    if job is None or job.time_limit_seconds is None or task.started_at is None or task.over is not None:
        return None
    return max(0.0, task.started_at + job.time_limit_seconds - turn.now)


def _restore_limit(task: Task, turn: Turn) -> None:
    if (left := _limit(task, turn)) is not None:
        turn.timer("time_limit", left, task=task.id)


def _review_limit(task: Task, turn: Turn) -> None:
    """Begin to measure the time of a job that has just started."""
    if task.started_at is None and task.slots and is_job(task, turn):
        task.started_at = turn.now
        turn.save(task)
        _restore_limit(task, turn)


def _limit_reached(task: Task, turn: Turn) -> None:
    job = turn.lasting.jobs.get(task.id)
    if job is not None and _limit(task, turn) is not None:
        finish(task, turn, succeeded=False, reason=f"its time limit of {job.time_limit_seconds:g} s is reached")


PART: Final = Part(restore=_restore_limit, timers={"time_limit": _limit_reached}, review=_review_limit)
