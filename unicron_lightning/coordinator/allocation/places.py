"""Places: accelerators that agents of several tasks share, and the tasks that may use them.

A place is a slot of a node by its label. Agents of different tasks may stand ready at the same place; the plan assigns
it to one task, and only that task's agent may have workers there. Agents without a label have accelerators of their
own, which no plan assigns.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from operator import attrgetter
from typing import Final

import msgspec

from unicron_lightning.coordinator.state import Agent, Cluster, Node, Task
from unicron_lightning.planner.placement import Place, PlaceList

NO_TASK: Final = ""
"""Task name of a place that the plan leaves unused."""


class Places(PlaceList):
    """Immutable list of places by name, with cached derivations; nearly all places are alike."""

    @cached_property
    def kinds(self) -> list[tuple[tuple[str, ...], list[str]]]:
        """Group places by the tasks that can use them. `usable_places` gives places that are alike the same tuple."""
        usual = self[0].tasks if self else ()
        kinds = {id(usual): (usual, [place.name for place in self if place.tasks is usual])} if self else {}
        for place in [place for place in self if place.tasks is not usual]:
            kinds.setdefault(id(place.tasks), (place.tasks, []))[1].append(place.name)
        return sorted(kinds.values())

    @cached_property
    def able(self) -> Counter[str]:
        """Number of places that each task can use."""
        counts: Counter[str] = Counter()
        for tasks, names in self.kinds:
            counts.update(dict.fromkeys(tasks, len(names)))
        return counts

    @cached_property
    def digest(self) -> bytes:
        """The kinds as JSON."""
        return msgspec.json.encode(self.kinds)


class DaemonPlaces:
    """Places of nodes that have a daemon, for all jobs. There may be thousands, so they are rebuilt only on a
    change.
    """

    def __init__(self) -> None:
        self._of: tuple[list[Node], dict[str, str], frozenset[str]] | None = None
        self._kinds: dict[str, str] = {}
        self._able: dict[str, tuple[str, ...]] = {}
        """Jobs of each kind; places that are alike share one tuple."""
        self.slots: dict[str, list[str]] = {}
        """Slots of each node that may be used."""
        self.places = Places()
        self.inside: set[str] = set()
        """Jobs whose agents are known to be at these places, all of them: there are thousands of agents to look at."""

    def registers(self, task: str) -> None:
        """Look at a task's agents again: one of them is new, or elsewhere."""
        self.inside.discard(task)

    @property
    def jobs(self) -> Collection[tuple[str, ...]]:
        """The jobs of each kind that nodes have."""
        return self._able.values()

    def able(self, node: str) -> tuple[str, ...]:
        """Return the jobs that can use a node, sorted."""
        assert self._of is not None
        kind, jobs = self._kinds[node], self._of[1]
        if kind not in self._able:
            self._able[kind] = tuple(sorted(job for job, own in jobs.items() if own == kind))
        return self._able[kind]

    def look(self, nodes: list[Node], jobs: dict[str, str], out: frozenset[str]) -> None:
        """Update the places from the nodes, the jobs with their kinds, and the nodes that must not be used."""
        of = (nodes, jobs, out)
        if of == self._of:
            return
        known, kinds = self.slots if self._of is not None and jobs == self._of[1] else {}, self._kinds
        slots = {node.label: node.slots for node in nodes if node.label not in out}
        self._of, self.slots = of, slots
        self._kinds = {node.label: node.kind for node in nodes}
        if slots == known and known and kinds == self._kinds:
            return
        if not known:
            self._able = {}
        new = [n for n, on_node in slots.items() if known.get(n) != on_node or kinds.get(n) != self._kinds[n]]
        changed = {*new, *(known.keys() - slots.keys())}
        if not known or not changed.isdisjoint(known):
            self.inside.clear()
        kept = [place for place in self.places if place.node not in changed] if known else []
        found = [Place(f"{label}/{slot}", label, self.able(label)) for label in new for slot in slots[label]]
        self.places = Places(sorted([*kept, *found], key=attrgetter("name")))


def usable_places(cluster: Cluster, daemons: DaemonPlaces | None = None) -> Places:
    """Return places that tasks may use now, by name: those of undrained agents that are present or may return.

    An agent that has left takes its task's claim with it, and the place if no other task has an agent there. Every job
    can use the slots of nodes that have a daemon, which starts agents where needed. A task that trains keeps its places
    on drained nodes, which no other task can use, while the others are fewer than its minimum: a drain pauses no task.

    Args:
        cluster: the whole state.
        daemons: cached places of the previous call.
    """
    daemons = DaemonPlaces() if daemons is None else daemons
    held = cluster.lasting.held
    known = cluster.lasting.jobs.items()
    jobs = {name: job.kind or "" for name, job in known if name in cluster.tasks and name not in held}
    out = cluster.lasting.out
    daemons.look(list(cluster.nodes.values()), jobs, out)
    others: dict[str, tuple[str, frozenset[str]]] = {}
    """Node and tasks of places that other tasks can use, too."""
    for task in cluster.tasks.values():
        if task.over is not None:
            continue
        if task.id in jobs and task.id in daemons.inside:
            continue  # nearly all tasks
        slots = daemons.slots if task.id in jobs else {}
        outside = [a for a in task.agents.values() if a.slot is not None and a.slot not in slots.get(a.node, ())]
        if task.id in jobs and not outside:
            daemons.inside.add(task.id)
        for agent in outside:
            place = f"{agent.node}/{agent.slot}"
            if _counts(cluster, task, agent):
                of_daemon = agent.slot in daemons.slots.get(agent.node, ())
                able = others[place][1] if place in others else frozenset(daemons.able(agent.node) if of_daemon else ())
                others[place] = agent.node, able | {task.id}
    if out:
        others |= _held_below_minimum(cluster, [*daemons.places], others)
    if not others:
        return daemons.places
    in_order = {able: tuple(sorted(able)) for able in {able for _, able in others.values()}}
    in_order |= {frozenset(jobs): jobs for jobs in daemons.jobs}
    found = {place.name: place for place in daemons.places}
    found |= {name: Place(name=name, node=node, tasks=in_order[able]) for name, (node, able) in others.items()}
    return Places(found[name] for name in sorted(found))


def has_places(cluster: Cluster) -> bool:
    """Whether there may be places: else every agent has accelerators of its own, and there is nothing to plan."""
    lasting = cluster.lasting
    known = lasting.planned or lasting.jobs or cluster.nodes
    return bool(known) or any(
        agent.slot is not None for task in cluster.tasks.values() for agent in task.agents.values()
    )


def competing_tasks(cluster: Cluster) -> list[Task]:
    """Return tasks that have agents at places, or could have, in the order of their submission, or else by id."""
    return sorted(_competing(cluster), key=lambda task: (task.created_at, task.id))


def several_compete(cluster: Cluster) -> bool:
    """Whether there is more than one of the `competing_tasks`."""
    return len(list(itertools.islice(_competing(cluster), 2))) > 1


def occupants(cluster: Cluster, nodes: Collection[str]) -> dict[str, tuple[Task, Agent]]:
    """Map places of some nodes to the agent that has workers there, or may have.

    An agent may have workers while it has not rejoined the rendezvous since its slot was granted.
    """
    there = ((task, a) for task in cluster.tasks.values() for a in task.agents.values() if a.node in nodes)
    return {
        agent.place: (task, agent)
        for task, agent in there
        if (agent.stopping or agent.id in task.slots) and agent.place is not None
    }


def _competing(cluster: Cluster) -> Iterator[Task]:
    jobs, held = cluster.lasting.jobs if cluster.nodes else {}, cluster.lasting.held
    tasks = (task for task in cluster.tasks.values() if task.over is None and task.id not in held)
    return (t for t in tasks if t.id in jobs or any(a.slot is not None for a in t.agents.values()))


def is_elsewhere(cluster: Cluster, agent: Agent) -> bool:
    """Whether the plan gives the agent's place to another task, or to none (`NO_TASK`)."""
    return agent.place is not None and cluster.lasting.assigned.get(agent.place, agent.task) != agent.task


def is_assigned(cluster: Cluster, agent: Agent) -> bool:
    """Whether the agent's accelerators are its own, or the plan in force assigns its place to its task."""
    return agent.place is None or cluster.lasting.assigned.get(agent.place) == agent.task


def _held_below_minimum(
    cluster: Cluster, of_daemons: list[Place], others: dict[str, tuple[str, frozenset[str]]]
) -> dict[str, tuple[str, frozenset[str]]]:
    """Return node and task of the places on drained nodes that a task has to keep until it can use others."""
    held: dict[str, tuple[str, frozenset[str]]] = {}
    for task in cluster.tasks.values():
        out = [agent for agent in map(task.agents.__getitem__, task.slots) if cluster.lasting.excludes(agent)]
        if not out or task.over is not None or not task.established or task.finishing:
            continue
        able = {place.name for place in of_daemons if task.id in place.tasks}
        able = {name for name in able if name not in others} | {
            n for n, (_, tasks) in others.items() if task.id in tasks
        }
        if len(able) < task.min_nodes:
            held |= {agent.place: (agent.node, frozenset({task.id})) for agent in out if agent.place is not None}
    return held


def _counts(cluster: Cluster, task: Task, agent: Agent) -> bool:
    """Whether the task can use the agent's place.

    An agent that has just lost its connection makes no new claim, since its node may be gone, and its neighbours' loss
    is then detected shortly. A place of its task stays with the task until the agent is declared lost.
    """
    its_own = cluster.lasting.assigned.get(agent.place or "") == task.id
    there = its_own or task.restoring or (agent.conn is not None and not agent.fresh)
    return there and not cluster.lasting.excludes(agent)


class AssignmentChanges:
    """The assignment when tasks were reviewed last: of thousands of places, a change concerns few tasks and nodes.

    A task's review depends on the other tasks only by the assignment of places where it has agents, and by the agents
    of others at places that the plan gives to it. So a task has nothing to do if neither the task of such a place has
    changed nor one of its agents waits at a place of its own. Drains, and everything about the task itself, lead to
    reviews where they happen.
    """

    def __init__(self) -> None:
        self._assigned: dict[str, str] | None = None
        self._tasks: frozenset[str] = frozenset()

    def forget(self) -> None:
        """Treat everything as changed: the last review may not have been completed."""
        self._assigned = None

    def take(self, cluster: Cluster, tasks: Collection[Task]) -> tuple[frozenset[str] | None, list[Task]]:
        """Compare with the assignment of the last call.

        Args:
            cluster: the whole state.
            tasks: tasks that compete for places.

        Returns:
            The nodes of places whose task has changed, None if it may be any; and those of ``tasks`` that have to be
            reviewed, in their order.
        """
        before, known = self._assigned, self._tasks
        assigned = cluster.lasting.assigned
        self._tasks = frozenset(task.id for task in tasks)
        if before is None:
            self._assigned = dict(assigned)
            return None, list(tasks)
        nodes: frozenset[str] = frozenset()
        if before != assigned:
            self._assigned = dict(assigned)
            nodes = _nodes_of(_changed(before, assigned))
        return nodes, [task for task in tasks if task.id not in known or _is_concerned(cluster, task, nodes)]


def _changed(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """List places whose task has changed, or that are in one of the two only."""
    return [*(name for name, task in after.items() if before.get(name) != task), *(before.keys() - after.keys())]


def _nodes_of(places: Collection[str]) -> frozenset[str]:
    """Return the nodes of places, and all else that stands before a ``/``: labels of slots may contain one."""
    return frozenset(name[:at] for name in places for at, letter in enumerate(name) if letter == "/")


def _is_concerned(cluster: Cluster, task: Task, nodes: Collection[str]) -> bool:
    agents = task.agents.values()  # thousands
    if nodes and not frozenset(nodes).isdisjoint(map(attrgetter("node"), agents)):
        return True
    return any(is_assigned(cluster, agent) for agent in [agent for agent in agents if agent.waiting or agent.warm])
