"""The coordinator's view of its tasks as plain JSON, for `GET /v1/status` and `unicron status`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final, Literal, NamedTuple, get_args

import msgspec

from unicron_lightning import wire
from unicron_lightning.coordinator.api.reasons import lost_nodes, staying, why_waiting
from unicron_lightning.coordinator.state import Agent, Cluster, Node, Task, Worker

TaskState = Literal[
    "queued",
    "forming",
    "starting",
    "running",
    "recovering",
    "joining",
    "leaving",
    "pausing",
    "holding",
    "restarting",
    "plain",
    "over",
]
TASK_STATES: Final[tuple[TaskState, ...]] = get_args(TaskState)
_PENDING: Final[dict[wire.EpochKind, TaskState]] = {
    "init": "forming",
    "restart": "forming",
    "fail": "recovering",
    "join": "joining",
    "leave": "leaving",
    "pause": "pausing",
    "relayout": "leaving",
}


def task_status(task: Task, assigned: Collection[str] = ()) -> dict[str, Any]:
    """Describe one task; ``assigned``: tasks to which the plan in force gives places. ``state`` is a `TaskState`."""
    members = {member.worker for member in task.members()}
    others = sorted((worker for worker in task.workers.values() if worker.id not in members), key=task.place)
    stepped = task.foremost
    return {
        "state": state_of_task(task, assigned),
        "life": task.life,
        "epoch": task.number,
        "kind": task.epoch.kind if task.epoch else None,
        "settled": task.settled,
        "hold": bool(task.epoch and task.epoch.hold),
        "min_nodes": task.min_nodes,
        "max_nodes": task.max_nodes,
        "target": task.target,
        "layout": _layout(task.layouts.spread.layout if task.layouts.spread else task.layouts.in_force),
        "layout_ordered": _layout(task.layouts.ordered),
        "created_at": task.created_at,
        "members": [
            {"rank": rank, **_worker(task, task.workers.get(member.worker), member.worker), "node": member.node}
            | _in_replica(task, member.worker)
            for rank, member in enumerate(task.members())
        ],
        "candidates": [_worker(task, worker, worker.id) for worker in others if worker.built],
        "starting": [_worker(task, worker, worker.id) for worker in others if not worker.built],
        "standby": [agent.id for agent in task.queue()],
        "agents": [_agent(task, agent) for agent in task.agents.values()],
        "checkpoint": msgspec.to_builtins(task.checkpoint),
        "memory": msgspec.to_builtins(task.memory.complete),
        "progress": {"step": task.committed, "metrics": stepped.metrics} if stepped else None,
        "step_seconds": {slots: round(speed.seconds, 6) for slots, speed in sorted(task.measured.speeds.items())},
        "degraded": task.watch.degraded,
        "stragglers": task.watch.stragglers,
        "last_failure": _last_failure(task),
        "incident": task.incident,
        "incidents": task.incidents,
        "restarts": task.restarts,
    }


def _in_replica(task: Task, worker: str) -> dict[str, Any]:
    """Describe a member's part in a model that is spread over several workers; empty for other models."""
    if not task.replicas or task.replicas_of != task.number:
        return {}
    for number, workers in enumerate(task.replicas):
        if worker in workers:
            layout = task.layouts.spread.layout if task.layouts.spread else None
            shard = workers.index(worker)
            stage = None if layout is None or layout.sharded else shard // layout.tensor
            return {"replica": number, "shard": shard, "stage": stage, "spare": False}
    return {"replica": None, "shard": None, "stage": None, "spare": True}


def _layout(layout: wire.Layout | None) -> dict[str, int] | None:
    return None if layout is None else layout.plain()


def cluster_status(cluster: Cluster) -> dict[str, Any]:
    """Describe nodes with a daemon, the plan in force (the task of each place), and what does not proceed, and why."""
    return {
        "nodes": {node.label: _node(cluster, node) for node in cluster.nodes.values()},
        "assigned": dict(sorted(cluster.lasting.assigned.items())),
        "waiting": {task.id: why for task in cluster.tasks.values() if (why := why_waiting(cluster, task))},
        "staying": staying(cluster),
        "lost": lost_nodes(cluster),
        "queued": [task.id for task in cluster.tasks.values() if task.over is None and not task.slots],
    }


def _last_failure(task: Task) -> dict[str, Any] | None:
    """Describe the newest failure since the last progress, judged or not."""
    newest = task.severity.newest
    fields = ("at", "node", "worker", "kind", "cause")
    return None if newest is None else {name: getattr(newest, name) for name in fields}


class NodeStanding(NamedTuple):
    """A node as the page and the metrics show it."""

    state: Literal["ready", "drained", "away", "lost"]
    up: bool
    """Whether its daemon or one of its agents is connected."""
    drained: bool
    """Whether it is drained by an operator, or cordoned."""


def node_standings(cluster: Cluster) -> dict[str, NodeStanding]:
    """Return all nodes by label, in order: those with a daemon or an agent, and those that were lost."""
    up = {node.label: node.conn is not None for node in cluster.nodes.values()}
    for task in cluster.tasks.values():
        for agent in task.agents.values():
            up[agent.node] = up.get(agent.node, False) or agent.conn is not None
    lost, out = lost_nodes(cluster), cluster.lasting.out
    return {
        label: NodeStanding(
            state="lost" if label in lost else "drained" if label in out else "ready" if up[label] else "away",
            up=up.get(label, False),
            drained=label in out,
        )
        for label in sorted({*up, *lost})
    }


def _node(cluster: Cluster, node: Node) -> dict[str, Any]:
    runs = [each for each in node.tasks if each.pid is not None]
    return {
        "host": node.host,
        "pid": node.pid,
        "connected": node.conn is not None,
        "drained": node.label in cluster.lasting.out,
        "slots": {
            slot: {
                "assigned": cluster.lasting.assigned.get(f"{node.label}/{slot}") or None,
                "agents": [each.job.name for each in runs if each.slot == slot],
            }
            for slot in node.slots
        },
    }


def state_of_task(task: Task, assigned: Collection[str] = ()) -> TaskState:
    """Return the state of a task; ``assigned`` as for `task_status`."""
    if task.over is not None:
        return "over"
    if not task.formed:
        return "forming" if task.agents else "starting" if task.id in assigned else "queued"
    if not task.elastic:
        return "restarting" if task.regrouping else "plain" if task.plain else "starting"
    if task.epoch is None:
        return "starting" if task.life == 1 else "restarting"
    if not task.settled:
        return _PENDING[task.epoch.kind]
    return "holding" if task.epoch.hold else "running"


def _worker(task: Task, worker: Worker | None, worker_id: str) -> dict[str, Any]:
    if worker is None:
        return {"worker": worker_id, "alive": False, "finished": worker_id in task.finished, "step": None}
    about = {"worker": worker_id, "alive": True, "finished": False, "step": worker.step, "pid": worker.pid}
    return {**about, "pace": None if worker.pace is None else msgspec.to_builtins(worker.pace)}


def _agent(task: Task, agent: Agent) -> dict[str, Any]:
    return {
        "agent": agent.id,
        "node": agent.node,
        "host": agent.host,
        "pid": agent.pid,
        "connected": agent.conn is not None,
        "round": agent.round,
        "slot": agent_standing(task, agent),
        "place": agent.place,
        "unhealthy": agent.barred,
        "memory": {"bytes": agent.memory_bytes, "steps": sorted({copy.version.step for copy in agent.copies})},
    }


def agent_standing(task: Task, agent: Agent) -> str:
    """Return whether an agent has a slot: ``granted``, ``warm``, ``waiting`` or ``none``."""
    if agent.id in task.slots:
        return "granted"
    return "warm" if agent.warm else "waiting" if agent.waiting else "none"
