"""Jobs: tasks that were submitted, from the queue to their end.

A job is a `Task` from its submission on. While no agent runs it, it waits (`Task.absent`): at the beginning, and
after all its nodes are lost. It fails when torchrun exhausts its restarts on the last node.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from unicron_lightning.coordinator.actions import Turn
from unicron_lightning.coordinator.lifecycle import Lifecycle
from unicron_lightning.coordinator.state import Cluster, JobResult, Lasting, Task
from unicron_lightning.jobs import Job

JobState = Literal["queued", "running", "succeeded", "failed", "cancelled"]

CANCELLED: Final = "cancelled"
"""Reason of a task's end by order."""
_RESULTS_KEPT: Final = 500


def refusal(cluster: Cluster, job: Job) -> str | None:
    """Return why the job is refused now, for its user; None if it is accepted."""
    task = cluster.tasks.get(job.name)
    if task is not None and task.over is None:
        return f"task {job.name!r} exists already: expected another name, or that it is cancelled first"
    if task is not None:
        return f"agents of an earlier task {job.name!r} have not ended yet: try again in a moment"
    return None


def submit(cluster: Cluster, turn: Turn, job: Job) -> None:
    """Accept a job; the caller has checked `refusal`."""
    job = msgspec.structs.replace(job, submitted_at=turn.now)
    adopt(cluster, turn, job)
    turn.emit_for(cluster.tasks[job.name], None, "job_submitted", {"command": job.command, "weight": job.weight})


def adopt(cluster: Cluster, turn: Turn, job: Job) -> None:
    """Record a job, and create its task if no agent runs it yet."""
    cluster.lasting.jobs[job.name] = job
    if job.name not in cluster.tasks:
        cluster.tasks[job.name] = Task(
            id=job.name,
            min_nodes=job.min_nodes,
            max_nodes=job.max_nodes,
            created_at=turn.now,
            weight=job.weight,
            lifecycle=Lifecycle(agents="absent"),
        )
        turn.save(cluster.tasks[job.name])
    turn.save_lasting()
    turn.places_changed = True


def is_job(task: Task, turn: Turn) -> bool:
    """Whether the task was submitted, so that nodes' daemons run it."""
    return task.id in turn.lasting.jobs


def ended(task: Task, turn: Turn, *, succeeded: bool, reason: str) -> None:
    """Record how a task, submitted or not, has ended."""
    lasting = turn.lasting
    job = lasting.jobs.pop(task.id, None)
    result = JobResult(
        name=task.id,
        state="cancelled" if reason == CANCELLED else "succeeded" if succeeded else "failed",
        reason=reason,
        managed=job is not None,
        submitted_at=job.submitted_at if job else task.created_at,
        ended_at=turn.now,
    )
    lasting.results = [*(each for each in lasting.results if each.name != task.id), result][-_RESULTS_KEPT:]
    turn.save_lasting()
    turn.places_changed = True


def result_of(lasting: Lasting, name: str) -> JobResult | None:
    """Return how the newest task of that name ended; None if it has not ended or is no longer recorded."""
    return next((result for result in reversed(lasting.results) if result.name == name), None)


def known(cluster: Cluster) -> list[str]:
    """Return the names of all known jobs and tasks, ended ones first."""
    return list(dict.fromkeys([*(result.name for result in cluster.lasting.results), *cluster.tasks]))


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
