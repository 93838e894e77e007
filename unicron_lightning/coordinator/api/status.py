"""The coordinator's view of its tasks as plain JSON, for `GET /v1/status` and ``unicron status``, and explanations.

Explanations for users are derived from the state: why a task waits, and why a drained node keeps its workers. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, Final, Literal, NamedTuple, get_args

import msgspec

from unicron_lightning import wire
from unicron_lightning.coordinator.allocation.places import is_assigned, occupants, usable_places
from unicron_lightning.coordinator.machine import drained
from unicron_lightning.coordinator.membership.slots import fewest
from unicron_lightning.coordinator.orders import calibration
from unicron_lightning.coordinator.severity.apply import LAST_HOLD_SECONDS
from unicron_lightning.coordinator.state import Agent, Cluster, Node, Task, Worker
from unicron_lightning.detection.silence import ISOLATION_SECONDS
from unicron_lightning.wire.fields import counted

_NAMED: Final = 3
"""Most workers that a reason names."""


def why_waiting(cluster: Cluster, task: Task) -> str | None:
    """Return why a task does not train, and what would end that; None if it trains, or has ended."""
    if task.over is not None:
        return None
    if task.rebuilding:
        return "resuming: the coordinator had lost its record, and waits for agents to register, and for their workers"
    away = [agent.node for agent in task.agents.values() if agent.conn is None]
    if task.restoring and away and (task.epoch is None or not task.settled):
        here = cluster.conns or any(node.conn is not None for node in cluster.nodes.values())
        most = "detection.restart_grace at most"
        if not here:
            most = f"{ISOLATION_SECONDS:g} s at most, as the coordinator hears no agent"
        return f"resuming: waits for {_few(away)} to connect again; for {most}"
    if task.epoch is not None and (task.epoch.hold or task.pausing or not task.settled):
        return _why_waiting_in_epoch(cluster, task, task.epoch)
    if task.slots:
        return _why_starting(cluster, task)
    return _why_queued(cluster, task) if task.id in cluster.lasting.jobs else _why_forming(cluster, task)


def staying(cluster: Cluster) -> dict[str, str]:
    """Return the drained nodes, and agents, whose workers cannot leave now, with the reasons."""
    found: dict[str, str] = {}
    for task in cluster.tasks.values():
        out = [agent for agent in (task.agents[each] for each in task.slots) if cluster.lasting.excludes(agent)]
        others, need = len(task.slots) - len(out), fewest(task)
        if task.over is None and out and others < need:
            has = "no other has" if not others else "1 other has" if others == 1 else f"{others} others have"
            reason = f"task {task.id} needs at least {counted(need, 'node')}, {has} its workers"
            found |= {
                name: reason for agent in out for name in (agent.node, agent.id) if name in drained(cluster.lasting)
            }
    return found


def lost_nodes(cluster: Cluster) -> dict[str, float]:
    """Return the nodes that were lost and have not come back, with the time.time() of their loss."""
    present = {agent.node for task in cluster.tasks.values() for agent in task.agents.values()} | set(cluster.nodes)
    return {node: at for node, at in cluster.lasting.lost.items() if node not in present}


def _why_waiting_in_epoch(cluster: Cluster, task: Task, epoch: wire.Epoch) -> str | None:
    if task.pausing:
        return "pausing: its members write a checkpoint; for detection.pause_grace at most"
    if not task.settled:
        if epoch.kind in wire.PLANNED and not epoch.hold:
            return None  # its members train until the next step boundary
        late = [member.worker for member in task.live_members() if task.workers[member.worker].ready != task.number]
        return f"recovering: waits for {_few(late) or 'its agents'}; for detection.recovery_time at most"
    here = len({member.agent for member in epoch.members})
    ends = "another node joins, it is resized, or severity.hold_timeout has passed"
    holds = f"holds below its minimum: needs {counted(task.min_nodes, 'node')}, has {here}, until {ends}"
    return "; ".join(filter(None, [holds, *_kept_out(cluster, task), task.severity.last_words]))


def _why_starting(cluster: Cluster, task: Task) -> str | None:
    if task.regrouping:
        stopping = [task.agents[agent].node for agent in task.slots]
        return f"restarting with other nodes: waits until {_few(stopping)} have stopped their workers"
    if task.plain or task.epoch is not None:
        return None
    if not task.elastic:
        return "starting: no worker has reported yet (those of a script without the strategy do not)"
    expected = sum(task.agents[agent].local_world or 1 for agent in task.slots)
    ready = sum(worker.built for worker in task.workers.values())
    starting, need = f"starting: {ready} of {counted(expected, 'worker')} ready", fewest(task)
    if len(task.slots) >= need:
        return starting
    has = f"needs {counted(need, 'node')}, has {len(task.slots)}"
    return "; ".join(filter(None, [starting, has, *_kept_out(cluster, task), task.severity.last_words]))


def _why_queued(cluster: Cluster, task: Task) -> str:
    """Explain the wait of a submitted task, from the places that it may use and the plan."""
    if (awaited := cluster.lasting.held.get(task.id)) is not None:
        return f"comes after {', '.join(awaited)}"
    assigned, need, kind = cluster.lasting.assigned, fewest(task), cluster.lasting.jobs[task.id].kind
    needs = f"needs {counted(need, 'node')}" + (f" of kind {kind}" if kind else "")
    places = [place.name for place in usable_places(cluster) if task.id in place.tasks]
    own = [place for place in places if assigned.get(place) == task.id]
    if len(own) >= need:
        return "; ".join([f"starting: torchrun at {', '.join(own)}", *_kept_out(cluster, task)])
    if len(places) < need:
        out = [node for node in drained(cluster.lasting) if node in cluster.nodes]
        without = [f"drained: {', '.join(out)}"] if out else []
        if lost := sorted(lost_nodes(cluster)):
            without.append(f"lost: {', '.join(lost)}")
        usable = f"{counted(len(places), 'slot')} {'is' if len(places) == 1 else 'are'} usable"
        return f"{needs}, {'; '.join([usable, *without])}"
    users = Counter(owner for place in places if (owner := assigned.get(place)) and owner != task.id)
    used = ", ".join(f"{name} ({number})" for name, number in sorted(users.items()))
    return f"{needs}, the plan gives {counted(len(places), 'usable slot')} to {used or 'no task'}"


def _why_forming(cluster: Cluster, task: Task) -> str:
    """Explain the wait of a task whose agents were started by a user."""
    waiting = len(_candidates(cluster, task))
    here = f"{counted(waiting, 'node')} {'waits' if waiting == 1 else 'wait'}"
    return "; ".join([f"needs {counted(fewest(task), 'node')}, {here}", *_kept_out(cluster, task)])


def _candidates(cluster: Cluster, task: Task) -> list[Agent]:
    return [agent for agent in task.queue() if not agent.barred and not cluster.lasting.excludes(agent)]


def _kept_out(cluster: Cluster, task: Task) -> list[str]:
    """Return why agents of a task have no slot yet."""
    late = [(agent.node, _why_late(cluster, agent)) for agent in _candidates(cluster, task)]
    without = [agent for agent in task.agents.values() if agent.id not in task.slots]
    out = sorted({agent.node for agent in without if cluster.lasting.excludes(agent)})
    drains = [f"drained: {', '.join(out)}"] if out else []
    barred = [f"{agent.node} is barred: {agent.barred}" for agent in without if agent.barred]
    return [*(f"{node} {why}" for node, why in late if why is not None), *drains, *barred]


def _why_late(cluster: Cluster, agent: Agent) -> str | None:
    """Return why an agent that waits is granted no slot yet, and how long at most."""
    if agent.conn is None:
        return "is away, for detection.reconnect_grace at most"
    if agent.held:
        return f"has failed to start, and begins again after {LAST_HOLD_SECONDS:g} s at most"
    if agent.place is not None and (user := occupants(cluster, (agent.node,)).get(agent.place)) is not None:
        return f"waits until the workers of {user[0].id} at its place have ended"
    if not is_assigned(cluster, agent):
        return "gets its place when the plan gives it to the task"
    return None


def _few(names: Sequence[str]) -> str:
    return f"{', '.join(names[:_NAMED])}{' and others' if len(names) > _NAMED else ''}"


_TaskState = Literal[
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
TASK_STATES: Final[tuple[_TaskState, ...]] = get_args(_TaskState)
_PENDING: Final[dict[wire.EpochKind, _TaskState]] = {
    "init": "forming",
    "restart": "forming",
    "fail": "recovering",
    "join": "joining",
    "leave": "leaving",
    "pause": "pausing",
    "relayout": "leaving",
}


def task_status(task: Task, assigned: Collection[str] = ()) -> dict[str, Any]:
    """Describe one task; ``assigned``: tasks to which the plan in force gives places. ``state`` is a `_TaskState`."""
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
        "calibration": calibration.plain(task),
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


class _NodeStanding(NamedTuple):
    """A node as the page and the metrics show it."""

    state: Literal["ready", "drained", "away", "lost"]
    up: bool
    """Whether its daemon or one of its agents is connected."""
    drained: bool
    """Whether it is drained by an operator, or cordoned."""


def node_standings(cluster: Cluster) -> dict[str, _NodeStanding]:
    """Return all nodes by label, in order: those with a daemon or an agent, and those that were lost."""
    up = {node.label: node.conn is not None for node in cluster.nodes.values()}
    for task in cluster.tasks.values():
        for agent in task.agents.values():
            up[agent.node] = up.get(agent.node, False) or agent.conn is not None
    lost, out = lost_nodes(cluster), cluster.lasting.out
    return {
        label: _NodeStanding(
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
        "kind": node.kind or None,
        "slots": {
            slot: {
                "assigned": cluster.lasting.assigned.get(f"{node.label}/{slot}") or None,
                "agents": [each.job.name for each in runs if each.slot == slot],
            }
            for slot in node.slots
        },
    }


def state_of_task(task: Task, assigned: Collection[str] = ()) -> _TaskState:
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
