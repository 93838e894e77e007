"""Tasks and nodes that a change of the assignment concerns: of thousands of places, it affects few.

A task's review depends on the other tasks only by the assignment of places where it has agents, and by the agents of
others at places that the plan gives to it. So a task has nothing to do if neither the task of such a place has changed
nor one of its agents waits at a place of its own. Drains, and everything about the task itself, lead to reviews where
they happen.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from operator import attrgetter

from unicron_lightning.coordinator.allocation.places import is_assigned
from unicron_lightning.coordinator.state import Cluster, Task


class AssignmentChanges:
    """The assignment when tasks were reviewed last, to find out what has changed since."""

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
