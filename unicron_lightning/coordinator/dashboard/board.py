"""The state that the page shows: a small entry for each task and node, and the changes since a version. Pure.

An entry is sent only when it has changed, so that a page of a thousand nodes costs little.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from unicron_lightning.coordinator.api.reasons import staying, why_waiting
from unicron_lightning.coordinator.api.status import agent_standing, node_standings, state_of_task
from unicron_lightning.coordinator.machine import Machine
from unicron_lightning.coordinator.metrics.exposition import waf_of
from unicron_lightning.coordinator.metrics.meters import usual_seconds
from unicron_lightning.coordinator.state import Agent, Cluster, Task

_MOST_LOST_RANKS = 16


def entries(machine: Machine, goodput: Callable[[str], float | None], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return all entries by key: ``task/NAME``, ``node/NAME``, and ``cluster``.

    Args:
        machine: the coordinator's machine.
        goodput: returns the productive share of a task's time; None if unknown.
        about: description of the coordinator's process.
    """
    cluster = machine.cluster
    found: dict[str, Any] = {f"task/{t.id}": _task(cluster, t, goodput(t.id)) for t in cluster.tasks.values()}
    stay = staying(cluster)
    for label, node in _nodes(cluster).items():
        node["why"] = stay.get(label) or cluster.lasting.cordoned.get(label)
        found[f"node/{label}"] = node
    found["cluster"] = {
        **about,
        "injection": machine.limits.allow_injection,
        "planned": sum(cluster.lasting.allocation.values()),
        "drained": machine.drained,
    }
    return found


def _task(cluster: Cluster, task: Task, goodput: float | None) -> dict[str, Any]:
    newest, failed = task.foremost, task.severity.newest
    seconds = usual_seconds(task)
    lost = [rank for rank, member in enumerate(task.members()) if member.worker not in task.workers]
    return {
        "state": state_of_task(task, cluster.lasting.assigned.values()),
        "over": task.over,
        "why": why_waiting(cluster, task),
        "life": task.life,
        "epoch": task.number,
        "kind": task.epoch.kind if task.epoch else None,
        "workers": len(task.live_members()),
        "world": len(task.members()),
        "lost_ranks": lost[:_MOST_LOST_RANKS],
        "slots": len(task.slots),
        "limit": task.limit,
        "nodes": [task.min_nodes, task.max_nodes],
        "target": task.target,
        "planned": cluster.lasting.allocation.get(task.id),
        "weight": task.weight,
        "step": newest.step if newest else None,
        "loss": newest.metrics.get("loss") if newest else None,
        "step_seconds": None if seconds is None else round(seconds, 6),
        "waf": waf_of(cluster, task),
        "goodput": None if goodput is None else round(goodput, 4),
        "checkpoint": task.checkpoint.step if task.checkpoint else None,
        "degraded": bool(task.watch.degraded),
        "stragglers": len(task.watch.stragglers),
        "incidents": task.incidents,
        "open": [
            {"incident": each.id, "cause": each.cause[:300], "phase": each.phase, "known_at": each.known_at}
            for each in task.accounts.open
        ],
        "failure": None if failed is None else {"kind": failed.kind, "cause": failed.cause[:300], "node": failed.node},
        "replicas": len(task.replicas) or None,
    }


def _nodes(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """Describe nodes by label: state, and cells ``[slot, task, state]`` for slots and agents."""
    agents: dict[str, list[tuple[Task, Agent]]] = defaultdict(list)
    working: set[str] = set()
    for task in cluster.tasks.values():
        for agent in task.agents.values():
            agents[agent.node].append((task, agent))
        working.update(task.workers[member.worker].agent for member in task.live_members())
    found = {}
    for label, standing in node_standings(cluster).items():
        daemon, here = cluster.nodes.get(label), agents.get(label, [])
        by_slot = {agent.slot: (task, agent) for task, agent in here if agent.slot is not None}
        cells = []
        for slot in daemon.slots if daemon is not None else ():
            owner = cluster.lasting.assigned.get(f"{label}/{slot}") or None
            task_agent = by_slot.pop(slot, None)
            state = "starting" if owner else "free"
            cells.append([slot, owner, state] if task_agent is None else _cell(slot, *task_agent, working))
        shown = {agent.id for _, agent in by_slot.values()}
        rest = [(t, a) for t, a in here if a.slot is None or a.id in shown]
        cells += [_cell(agent.slot or "", task, agent, working) for task, agent in rest]
        host = daemon.host if daemon is not None else here[0][1].host if here else None
        problems = sorted({problem for _, agent in here for problem in (agent.problems or ())})
        found[label] = {
            "state": standing.state,
            "host": host,
            "cells": cells,
            "problems": problems,
            "daemon": daemon is not None,
        }
    return found


def _cell(slot: str, task: Task, agent: Agent, working: set[str]) -> list[str | None]:
    standing = agent_standing(task, agent)
    if agent.conn is None:
        state = "away"
    elif agent.barred:
        state = "barred"
    elif standing != "granted":
        state = "warm" if standing == "warm" else "waiting"
    elif agent.id not in working and not task.plain:
        state = "starting"
    else:
        state = "running" if task.plain or task.settled else "recovering" if task.incident else "running"
    return [slot, task.id, state]


class Board:
    """Versions of entries; a viewer gets what has changed since the version that it has."""

    def __init__(self) -> None:
        self.version = 0
        self._texts: dict[str, tuple[int, str]] = {}
        self._gone: dict[str, int] = {}

    def update(self, found: Mapping[str, Any]) -> bool:
        """Take the present entries; return whether any has changed."""
        texts = {key: json.dumps(entry, separators=(",", ":")) for key, entry in found.items()}
        changed = [key for key, text in texts.items() if self._texts.get(key, (0, ""))[1] != text]
        gone = [key for key in self._texts if key not in texts]
        if not changed and not gone:
            return False
        self.version += 1
        for key in changed:
            self._texts[key] = (self.version, texts[key])
            self._gone.pop(key, None)
        for key in gone:
            del self._texts[key]
            self._gone[key] = self.version
        self._gone = dict([*self._gone.items()][-10_000:])
        return True

    def since(self, version: int) -> str:
        """Return the changes after a version as JSON: ``{"full", "set": {key: entry}, "gone": [key]}``; all for 0."""
        entries = [f"{json.dumps(key)}:{text}" for key, (at, text) in self._texts.items() if at > version]
        gone = [key for key, at in self._gone.items() if at > version] if version else []
        full = "false" if version else "true"
        return f'{{"full":{full},"set":{{{",".join(entries)}}},"gone":{json.dumps(gone)}}}'
