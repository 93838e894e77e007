"""Tasks whose model is spread over several workers: they run on whole replicas, and shrink by whole replicas.

Workers report the number of workers of a replica (`wire.WorkerHello.granularity`) and, in each epoch, the members of
each replica (`wire.Replicas`). Other tasks report nothing, and everything here leaves them unchanged.

* Slots and places are given to a task in multiples of a replica's size (`Task.granularity`).
* A task that must release some releases spares first, then the youngest replicas.
* If a plan would break the only whole replica, places are exchanged so that the task keeps those of the replica.
* With each ``leave`` at least one whole replica stays, and no more replicas leave than can without loss of state. A
  drained node whose replica is the only one stays until another is whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unicron_lightning import wire
from unicron_lightning.coordinator.actions import Turn
from unicron_lightning.coordinator.allocation.places import NO_TASK, Places
from unicron_lightning.coordinator.orders import relayout
from unicron_lightning.coordinator.state import Agent, Task


def hello(task: Task, turn: Turn, agent: Agent, message: wire.WorkerHello) -> None:
    """Record the number of workers of a replica, as a worker reports it."""
    if message.granularity is None:
        return
    in_force = task.layouts.in_force  # the number is that of the script's own layout
    nodes = relayout.nodes_of(agent, message.granularity if in_force is None else in_force.workers)
    if nodes != task.replica_nodes:
        task.replica_nodes = nodes
        turn.places_changed = True
        turn.save(task)


def record_replicas(task: Task, turn: Turn, message: wire.Replicas) -> None:
    """Record the members of each replica, as a worker reports them."""
    if message.epoch == task.number:
        task.replicas, task.replicas_of, task.replicas_at_once = message.replicas, message.epoch, message.at_once
        turn.places_changed = True
        relayout.record_spread(task, turn, message.spread)
        turn.save(task)


def awaited(task: Task) -> bool:
    """Whether the members have not reported their replicas in this epoch yet: until they have, none may leave."""
    return task.replica_nodes > 0 and task.replicas_of != task.number


def fewest(task: Task) -> int:
    """Return the fewest nodes that a life can start with: at least one whole replica."""
    return max(task.min_nodes, task.granularity)


def whole(task: Task) -> dict[str, int]:
    """Map agents to the whole replica of their workers, all of which live; lower numbers are older replicas.

    Agents that share workers with two replicas are treated as belonging to one.
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
    """Sort agents with a slot by need; equal ones stay in their order. The last are most dispensable.

    Agents whose workers train come first, those with a straggler among them after the others, then agents whose workers
    have died, restart or have not joined yet; among equals by replica, then spares.
    """
    needs = _needs(task)
    return sorted(agents, key=needs.__getitem__)


def worth(task: Task, before: Mapping[str, str]) -> dict[str, int]:
    """Rank places in the order of `most_needed_first`, places without an agent last.

    Args:
        task: the task that holds the places.
        before: task of each place so far.

    Returns:
        A number for each of the task's places; lower ones are kept first.
    """
    needs = _needs(task)
    ranks = {need: number for number, need in enumerate(sorted(set(needs.values())))}
    at = {task.agents[agent].place: ranks[need] for agent, need in needs.items()}
    return {place: at.get(place, len(ranks)) for place, owner in before.items() if owner == task.id}


def _needs(task: Task) -> dict[str, tuple[int, int]]:
    """Map agents with a slot to their need; lower ones are needed more."""
    number, alive = whole(task), [worker for worker in task.established if worker in task.workers]
    training = {task.workers[worker].agent for worker in alive}
    slow = {task.workers[worker].agent for worker in alive if worker in task.watch.stragglers}
    state = {agent: int(agent in slow) if agent in training else 2 if training else 0 for agent in task.slots}
    return {agent: (state[agent], number.get(agent, len(task.replicas))) for agent in task.slots}


def keep_together(tasks: Sequence[Task], places: Places, assigned: dict[str, str]) -> dict[str, str]:
    """Change a plan so that no task has to leave a place of its only whole replica, which it could not do.

    Args:
        tasks: tasks that share places.
        places: the usable places.
        assigned: the task of each place.

    Returns:
        The plan with places exchanged: each task has the same number.
    """
    spread = [task for task in tasks if task.replicas and not awaited(task)]
    if not spread:
        return assigned
    able, result = places.users, dict(assigned)
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
                if whose == task.id and other not in held and (owner == NO_TASK or owner in able.get(other, ()))
            ]
            if others:
                result[place], result[min(others, key=lambda other: (other in used, other))] = task.id, owner
    return result


def bearable(task: Task, away: set[str]) -> set[str]:
    """Select the agents that can leave now.

    Args:
        task: in a settled epoch.
        away: agents with a slot that should leave.
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
    """Return why a task cannot have this number of nodes, for the operator; None if it can."""
    step = task.granularity
    if nodes % step == 0:
        return None
    least = -(-task.min_nodes // step) * step
    most = task.max_nodes // step * step
    return f"nodes={nodes}: a replica of the model takes {step} nodes; expected {least}, ... {most}, or all"
