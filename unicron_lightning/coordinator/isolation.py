"""Isolation of inputs that the machine fails to process: a failure affects only the task that the input belongs to.

An exception in the middle of a turn leaves the turn's tasks half changed, but nothing has been written or sent yet.
Each of these tasks is *set back* to its state in the store, and its agents' connections are closed: the agents register
again, as after a restart of the coordinator, while training continues. An agent whose messages fail twice is refused.
A task that had to be set back too often is *stopped*: its agents are notified that it has failed, and why.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Final

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator import parts
from unicron_lightning.coordinator.actions import Turn
from unicron_lightning.coordinator.lifecycle import Lifecycle
from unicron_lightning.coordinator.orders import jobs
from unicron_lightning.coordinator.state import Agent, Cluster, Task
from unicron_lightning.wire.fields import shortened

WINDOW: Final = 60.0
"""Seconds for which failures count."""
MOST_OF_AN_AGENT: Final = 2
MOST_OF_A_TASK: Final = 5

FindStored = Callable[[str], Task | None]
"""Returns a task as stored; None if it is not stored, or not readable."""


class Failures:
    """Failures of the last minute, of tasks or of agents.

    Args:
        most: number of failures of one that are too many.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._times: dict[str, list[float]] = {}

    def are_too_many(self, of: str, now: float) -> bool:
        """Count a failure; return whether there are too many."""
        late = {name: [at for at in times if 0 <= now - at < WINDOW] for name, times in self._times.items()}
        self._times = {name: times for name, times in late.items() if times}
        self._times.setdefault(of, []).append(now)
        return len(self._times[of]) >= self._most


def diagnosis(error: Exception) -> str:
    """Describe the error and where it was raised, in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {shortened(str(error))}{where}"


def agent_of(event: ev.Input, cluster: Cluster) -> str | None:
    """Return the agent that sent the input; None if none did."""
    if not isinstance(event, ev.AgentMessage):
        return None
    if isinstance(event.message, wire.Register):
        return event.message.agent
    return cluster.conns.get(event.conn, ("", None))[1]


def set_back(cluster: Cluster, turn: Turn, task_id: str, stored: Task | None, why: str) -> None:
    """Discard changes of a task since it was written; its agents register again."""
    _disconnect(cluster, turn, task_id)
    cluster.tasks.pop(task_id, None)
    if stored is not None:
        cluster.tasks[task_id] = stored
        turn.emit_of_cluster("task_set_back", of=task_id, reason=why)
        parts.restore(stored, turn)
        turn.to_review[task_id] = stored
        return
    turn.actions.append(ev.Forget(task=task_id))
    turn.emit_of_cluster("task_set_back", of=task_id, reason=why)
    if (job := cluster.lasting.jobs.get(task_id)) is not None:
        jobs.adopt(cluster, turn, job, created_at=job.submitted_at)


def stop(cluster: Cluster, turn: Turn, task_id: str, why: str) -> None:
    """End a task as failed without relying on its state; agents that return are notified, too."""
    old = cluster.tasks.get(task_id)
    reason = f"the coordinator cannot handle this task: {why}"
    if old is None:
        _disconnect(cluster, turn, task_id)
        turn.actions.append(ev.Forget(task=task_id))
        turn.emit_of_cluster("task_stopped", of=task_id, reason=reason)
        return
    task = Task(
        id=task_id,
        min_nodes=old.min_nodes,
        max_nodes=old.max_nodes,
        created_at=old.created_at,
        lifecycle=Lifecycle(over=False),
    )
    by_agent = {agent: conn for conn, (of, agent) in cluster.conns.items() if of == task_id}
    for each in old.agents.values():
        conn = by_agent.get(each.id)
        task.agents[each.id] = Agent(
            id=each.id, task=task_id, node=each.node, host=each.host, pid=each.pid, slot=each.slot, conn=conn
        )
        turn.send(task.agents[each.id], wire.TaskOver(succeeded=False, reason=reason))
        if conn is None:
            turn.timer("lost", turn.limits.reconnect_grace, task=task_id, agent=each.id)
    cluster.tasks[task_id] = task
    jobs.ended(task, turn, state="failed", reason=reason)
    turn.emit_of_cluster("task_stopped", of=task_id, reason=reason)
    turn.save(task)
    turn.to_review[task_id] = task


def _disconnect(cluster: Cluster, turn: Turn, task_id: str) -> None:
    conns = [conn for conn, (of, _) in cluster.conns.items() if of == task_id]
    conns += [item.conn for item in cluster.pending.pop(task_id, [])]
    for conn in conns:
        cluster.conns.pop(conn, None)
        turn.close(conn, "the task was set back: register again")
