"""Tasks whose model is spread over several workers: they run on whole replicas, and leave in whole replicas.

Workers tell how many of them a replica takes (`wire.WorkerHello.granularity`) and, in each epoch, who is in which
(`wire.Replicas`). Of other tasks nothing is told, and everything here leaves them as they are.

* Slots and places are given to a task in multiples of what a replica takes (`Task.granularity`).
* Who is to give some up gives up spares first, then the youngest replicas.
* A plan that would break the only whole replica has places exchanged: the task keeps those where that is.
* With each ``leave`` at least one whole replica stays, and no more of them go than can without loss of state. A drained
  node whose replica is the only one stays until another is whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unicron_lightning import wire
from unicron_lightning.coordinator import relayout
from unicron_lightning.coordinator.places import NOBODY, Places, users
from unicron_lightning.coordinator.state import Agent, Task
from unicron_lightning.coordinator.turn import Turn


def hello(task: Task, turn: Turn, agent: Agent, message: wire.WorkerHello) -> None:
    """A worker has told of how many a replica consists."""
    workers = relayout.granularity(task, message.granularity)
    if workers is None:
        return
    nodes = relayout.nodes_of(agent, workers)
    if nodes != task.replica_nodes:
        task.replica_nodes = nodes
        turn.places_changed = True
        turn.save(task)


def told(task: Task, turn: Turn, message: wire.Replicas) -> None:
    """A worker has told who is in which."""
    if message.epoch == task.number:
        task.replicas, task.replicas_of, task.replicas_at_once = message.replicas, message.epoch, message.at_once
        turn.places_changed = True
        relayout.told(task, turn, message.spread)
        turn.save(task)


def awaited(task: Task) -> bool:
    """Whether the members have not told yet who is in which replica in this epoch: until they have, none leaves."""
    return task.replica_nodes > 0 and task.replicas_of != task.number


def fewest(task: Task) -> int:
    """Nodes with which a life can begin: one whole replica at least."""
    return max(task.min_nodes, task.granularity)


def whole(task: Task) -> dict[str, int]:
    """The replica of each agent that has workers in one all of whose workers live; a lower number is an older one.

    Agents that share workers with two replicas are taken for one.
    """
    found: dict[str, int] = {}
    for number, workers in enumerate(task.replicas):
        if all(worker in task.workers for worker in workers):
            agents = {task.workers[worker].agent for worker in workers}
            first = min((found[agent] for agent in agents if agent in found), default=number)
            for agent in agents:
                found.setdefault(agent, first)
    return found


def most_needed_first(task: Task, agents: Sequence[str]) -> list[str]:
    """Agents with a slot, so that the last ones can best be spared: by replica, then spares; else in their order."""
    number = whole(task)
    return sorted(agents, key=lambda agent: number.get(agent, len(task.replicas)))


def worth(task: Task, before: Mapping[str, str]) -> dict[str, int]:
    """The same for places.

    Args:
        task: whose.
        before: task of each place so far.

    Returns:
        A number for each of the task's; those with lower ones stay first. Empty if the task has no replicas.
    """
    if not task.replicas:
        return {}
    number = whole(task)
    at = {task.agents[agent].place: number[agent] for agent in task.slots if agent in number}
    return {place: at.get(place, len(task.replicas)) for place, owner in before.items() if owner == task.id}


def keep_together(tasks: Sequence[Task], places: Places, assigned: dict[str, str]) -> dict[str, str]:
    """A plan in which no task is to leave a place of its only whole replica, which it could not: another would wait.

    Args:
        tasks: that share places.
        places: that may be used.
        assigned: the task of each place.

    Returns:
        The same with places exchanged: as many for each task.
    """
    spread = [task for task in tasks if task.replicas and not awaited(task)]
    if not spread:
        return assigned
    able, result = users(places), dict(assigned)
    for task in spread:
        number = whole(task)
        if len(set(number.values())) != 1:
            continue
        held = {place for agent in number if (place := task.agents[agent].place) is not None}
        used = {task.agents[agent].place for agent in task.slots}
        for place in sorted(place for place in held if place in able and result.get(place) not in (None, task.id)):
            owner = result[place]
            others = [
                other
                for other, whose in result.items()
                if whose == task.id and other not in held and (owner == NOBODY or owner in able.get(other, ()))
            ]
            if others:
                result[place], result[min(others, key=lambda other: (other in used, other))] = task.id, owner
    return result


def bearable(task: Task, away: set[str]) -> set[str]:
    """Those of the agents that are to leave that can do so now.

    Args:
        task: in a settled epoch.
        away: agents with a slot.
    """
    if not task.replica_nodes or not away:
        return away
    members = {member.agent for member in task.members()}
    if awaited(task):
        return away - members
    number = whole(task)
    touched = sorted({number[agent] for agent in away & members if agent in number}, reverse=True)
    most = len(set(number.values())) - 1
    if task.replicas_at_once is not None:
        most = min(most, task.replicas_at_once)
    going = touched[: max(0, most)]
    return {agent for agent in away if agent not in members or agent not in number or number[agent] in going}


def refusal(task: Task, nodes: int) -> str | None:
    """Why a task cannot have so many nodes, for the operator; None if it can."""
    step = task.granularity
    if nodes % step == 0:
        return None
    least = -(-task.min_nodes // step) * step
    most = task.max_nodes // step * step
    return f"nodes={nodes}: a replica of the model takes {step} nodes; expected {least}, ... {most}, or all"
