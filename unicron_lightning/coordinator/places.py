"""Places: accelerators that agents of several tasks share, and who may use which.

A place is a slot of a node by its label. Agents of different tasks may stand ready at the same one; the plan assigns it
to one task, and only that task's agent may have workers there. Agents without a label have accelerators of their own,
which no plan gives away.
"""

from __future__ import annotations

from typing import Final

import msgspec

from unicron_lightning.coordinator.state import Agent, Cluster, Task

NOBODY: Final = ""
"""Stands for a task where the plan leaves a place unused."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A place that may be used now.

    Attributes:
        name: ``<node>/<slot>``.
        node: where it is.
        tasks: those that could use it, sorted.
    """

    name: str
    node: str
    tasks: tuple[str, ...]


def usable_places(cluster: Cluster) -> list[Place]:
    """Places that tasks may use now, by name: those of agents that are there or may come back, undrained.

    An agent that has gone takes its task's claim with it, and the place if no other task has an agent there. Every job
    can use the slots of nodes that have a daemon: it starts the agents where they are wanted.
    """
    nodes: dict[str, str] = {}
    tasks: dict[str, frozenset[str]] = {}
    jobs = frozenset(job for job in cluster.lasting.jobs if job in cluster.tasks)
    for node in cluster.nodes.values():
        if node.label not in cluster.lasting.drained and node.label not in cluster.lasting.cordoned:
            for place in node.places:
                nodes[place] = node.label
                tasks[place] = jobs
    for task in cluster.tasks.values():
        if task.over is not None:
            continue
        for agent in task.agents.values():
            place_ = agent.place
            if place_ is not None and task.id not in tasks.get(place_, ()) and _counts(cluster, task, agent):
                nodes[place_] = agent.node
                tasks[place_] = tasks.get(place_, frozenset()) | {task.id}
    in_order = {able: tuple(sorted(able)) for able in set(tasks.values())}
    return [Place(name=name, node=nodes[name], tasks=in_order[tasks[name]]) for name in sorted(nodes)]


def competing_tasks(cluster: Cluster) -> list[Task]:
    """Tasks that have agents at places, or could have, by id."""
    jobs = cluster.lasting.jobs if cluster.nodes else {}
    tasks = (task for task in cluster.tasks.values() if task.over is None)
    competing = (t for t in tasks if t.id in jobs or any(a.place is not None for a in t.agents.values()))
    return sorted(competing, key=lambda task: task.id)


def occupants(cluster: Cluster) -> dict[str, tuple[Task, Agent]]:
    """By place, whose agent has workers there, or may have: it has not come back to wait since its slot was granted."""
    return {
        agent.place: (task, agent)
        for task in cluster.tasks.values()
        for agent in task.agents.values()
        if agent.place is not None and (agent.stopping or agent.id in task.slots)
    }


def is_elsewhere(cluster: Cluster, agent: Agent) -> bool:
    """Whether the plan gives the agent's place to another task, or to none (`NOBODY`)."""
    return agent.place is not None and cluster.lasting.assigned.get(agent.place, agent.task) != agent.task


def is_assigned(cluster: Cluster, agent: Agent) -> bool:
    """Whether the agent's accelerators are its own, or its place is its task's by the plan in force."""
    return agent.place is None or cluster.lasting.assigned.get(agent.place) == agent.task


def _counts(cluster: Cluster, task: Task, agent: Agent) -> bool:
    """Whether the task can use the agent's place.

    One that has just lost its connection makes no new claim, as its node may be gone and its neighbours will be found
    to be in a moment; what its task has is its task's until it is given up.
    """
    its_own = cluster.lasting.assigned.get(agent.place or "") == task.id
    there = its_own or task.restoring or (agent.conn is not None and not agent.fresh)
    return there and not is_drained(cluster, agent)


def is_drained(cluster: Cluster, agent: Agent) -> bool:
    """Whether the agent, or its node, is to have no workers, whatever the plan: drained, or cordoned."""
    lasting = cluster.lasting
    return agent.node in lasting.drained or agent.id in lasting.drained or agent.node in lasting.cordoned
