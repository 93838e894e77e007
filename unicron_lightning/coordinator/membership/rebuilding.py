"""A task whose record was lost with the coordinator's store: it resumes with the workers that hold its state.

Agents register with what their workers have reported, and are given `restart_grace` for it. A member that has not
stopped yet for the newest epoch, e.g. in a long micro-batch, is waited for as in any epoch, for `recovery_time` since
the first registration. Work of an epoch is lost only with its `wire.Go`: before, its members have computed nothing in
it, and one that is still in the epoch before it can stay.
"""

from __future__ import annotations

from typing import Final

from unicron_lightning.coordinator import lifecycle
from unicron_lightning.coordinator.actions import Turn
from unicron_lightning.coordinator.membership.epochs import (
    expel,
    holds_state,
    open_incident,
    publish,
    turn_into_joiners,
)
from unicron_lightning.coordinator.part import Part
from unicron_lightning.coordinator.state import Task, Worker

_JOIN: Final = "join"
"""Name of the operation in which members hand over the state, as in `worker.engine`."""
AGAIN_SECONDS: Final = 0.5
"""Seconds between looks for members that have not stopped yet."""


def rebuild_due(task: Task, turn: Turn) -> None:
    """Resume with the workers that hold the task's state, after all agents had time to register."""
    if not task.rebuilding:
        return
    reported = [worker for worker in task.workers.values() if worker.ready > 0 and holds_state(worker)]
    computing = [worker for worker in task.workers.values() if worker.member and not worker.ready]
    if reported and computing and turn.now < task.created_at + turn.limits.recovery_time:
        turn.timer("rebuild", AGAIN_SECONDS, task=task.id)
        return
    lifecycle.move(task, rebuilding=False)
    turn.places_changed = True
    turn.save(task)
    if task.over is not None:
        return
    if not reported:
        for worker in [worker for worker in task.workers.values() if not worker.founder]:
            expel(task, turn, worker, "no member is left that it could join")
        return
    newest = max(worker.ready for worker in reported)
    began = _begun(task, reported, newest)
    for worker in reported:
        if worker.ready < began:  # members of the newest epoch may have recomputed its work
            expel(task, turn, worker, f"it was in epoch {worker.ready}, others are in {newest}")
    holders = [worker for worker in reported if worker.ready >= began]
    # Joiners stay in an epoch that the others have entered to hand over the state: they may have received it since.
    joining = all(worker.state.get("operation") == _JOIN for worker in holders)
    there = (worker for worker in task.workers.values() if worker in holders or (joining and worker.ready == newest))
    members = sorted(there, key=task.place)
    task.established = [worker.id for worker in members]
    open_incident(task)
    publish(task, turn, "fail", [task.as_member(worker) for worker in members])
    turn_into_joiners(task, turn, set(task.established))


def _begun(task: Task, reported: list[Worker], newest: int) -> int:
    """Return the newest epoch in which members may have computed; ``newest`` if an agent has not told."""
    went = [task.agents[worker.agent].went for worker in reported]
    return newest if 0 in went else min(newest, max(went))


PART: Final = Part(timers={"rebuild": rebuild_due})
