"""Slots of running agents: grants, stand-by, group ranks, and the common restart of plain scripts.

Rules:

* No slot is granted before ``min_nodes`` agents wait; then all of them get one, up to `Task.limit`, in order of
  arrival.
* A later agent is granted a slot at once while some are free, else it is a stand-by. An agent that rendezvouses again
  keeps its slot but moves to the end of the order, so that group rank 0 stays with the longest-lived agent.
* A *plain script* (no worker sends a hello) cannot adapt to a change of agents in process. Once the script is known to
  be plain, a change stops all agents, and when all of them wait they are granted slots together. Until then, changes
  are granted as for an elastic task and recorded.
* An agent on a drained node, at a place that the plan gives to another task, or at a place where another task still has
  workers, gets no slot. A running one keeps its slot until its workers can leave the task: at a step boundary for an
  elastic task (see `epochs`); a plain script is restarted without it.
* Once the task's end has begun no slot is granted any more.

**Replicas.** Tasks whose model is spread over several workers run on whole replicas, and shrink by whole replicas.

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
from typing import Final

from unicron_lightning import wire
from unicron_lightning.coordinator import lifecycle
from unicron_lightning.coordinator.actions import Part, Turn, on
from unicron_lightning.coordinator.allocation.places import NO_TASK, Places
from unicron_lightning.coordinator.incidents.facts import SlotGrant
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


def _most_needed_first(task: Task, agents: Sequence[str]) -> list[str]:
    """Sort agents with a slot by need; equal ones stay in their order. The last are most dispensable.

    Agents whose workers train come first, those with a straggler among them after the others, then agents whose workers
    have died, restart or have not joined yet; among equals by replica, then spares.
    """
    needs = _needs(task)
    return sorted(agents, key=needs.__getitem__)


def worth(task: Task, before: Mapping[str, str]) -> dict[str, int]:
    """Rank places in the order of `_most_needed_first`, places without an agent last.

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


def review_slots(task: Task, turn: Turn) -> None:
    """Grant the slots and send the ranks that are due now. Idempotent."""
    if task.over is not None:
        return
    _review_drained(task, turn)
    _review_grants(task, turn)
    _review_ranks(task, turn)


def begin_rendezvous(task: Task, turn: Turn, agent: Agent, message: wire.RendezvousBegin) -> None:
    """Handle an agent's request for a grant; the caller has removed its workers of earlier rounds."""
    known = agent.waiting or agent.warm or agent.id in task.slots
    if message.round < agent.round or (message.round == agent.round and known):
        return  # repeated after a reconnection
    agent.holder = agent.id in task.slots
    leave_slot(task, agent)
    agent.round = message.round
    agent.store = message.store
    agent.waiting = True
    agent.stopping = False
    agent.gone = []
    turn.places_changed = True
    task.arrivals += 1
    agent.arrived = task.arrivals
    turn.save(task)


def leave_slot(task: Task, agent: Agent) -> None:
    """Free the agent's slot, if it has one; its workers of this round, warm ones too, no longer belong to the task."""
    if agent.id in task.slots:
        task.slots.remove(agent.id)
    agent.local_world = None
    agent.ranked = False
    agent.waiting = False
    agent.warm = False
    agent.hellos = {}


def revoke(
    task: Task, turn: Turn, agent: Agent, reason: str, seconds: float | None = None, *, needed: bool = False
) -> None:
    """Take the slot back: the agent stops its workers, which no longer belong to the task, and is a stand-by.

    Workers that do not stop within ``seconds`` are killed (None: within the time that the agent's user chose).
    """
    leave_slot(task, agent)
    agent.stopping = True
    agent.holder = False
    turn.send(agent, wire.Stop(reason=reason, seconds=seconds, needed=needed))
    turn.emit(task, "slot_revoked", agent=agent.id, node=agent.node, reason=reason)


def agent_gone(task: Task, turn: Turn, *, had_slot: bool, succeeded: bool) -> None:
    """Apply the membership rule of plain scripts to an agent that has left `Task.agents`."""
    if task.elastic or succeeded or not task.formed or not had_slot:
        return
    if task.plain:
        _start_regroup(task, turn, "a node left")
    else:
        lifecycle.agents_changed(task)


def _local_world(task: Task, turn: Turn, agent: Agent, message: wire.LocalWorld) -> None:
    """Record the number of workers that an agent starts."""
    started = agent.warm or agent.id in task.slots
    if message.round == agent.round and started and agent.local_world is None:
        agent.local_world = message.size
        turn.save(task)


def _store_used(task: Task, turn: Turn, agent: Agent, message: wire.StoreUsed) -> None:
    """Record evidence that the script is a plain one: earlier changes now count."""
    if message.round != agent.round or task.elastic or task.plain:
        return
    changed = lifecycle.found_plain(task)
    turn.save(task)
    if changed:
        _start_regroup(task, turn, "the task's nodes changed")


def _start_regroup(task: Task, turn: Turn, reason: str) -> None:
    """Plain script: have all agents stop their workers and rendezvous again."""
    if task.regrouping or not task.formed:
        return
    lifecycle.regroup(task)
    for agent_id in task.slots:
        turn.send(task.agents[agent_id], wire.Stop(reason=reason))
    turn.emit(task, "task_regroups", reason=reason)


def leaving(task: Task, turn: Turn) -> set[str]:
    """Return agents that hold a slot and have to leave it.

    These are departing agents, those on drained nodes, and the newest of the others beyond `Task.limit`.
    Such an excess arises when the task shrinks, or when a drained node returns before it has left and another one has
    its slot already. Agents at places that the plan gives the task stay: the plan itself selects which of them leave.
    """
    assigned, out = turn.lasting.assigned, turn.lasting.out
    away: set[str] = set()
    others: list[str] = []
    for agent_id in task.slots:
        agent = task.agents[agent_id]
        owner = None if agent.slot is None else assigned.get(f"{agent.node}/{agent.slot}")
        if owner not in (None, task.id) or agent.departing or agent.node in out or agent_id in out:
            away.add(agent_id)
        elif owner is None:
            others.append(agent_id)
    planned = len(task.slots) - len(away) - len(others)
    most = max(0, task.limit - planned)
    return away.union(_most_needed_first(task, others)[most:]) if len(others) > most else away


def undrained(task: Task, turn: Turn) -> list[str]:
    """List agents with a slot whose node is not drained, in slot order."""
    agents = task.agents
    return [agent.id for agent in turn.undrained(agents[agent_id] for agent_id in task.slots)]


def send_grant(task: Task, turn: Turn, agent: Agent) -> None:
    """Send an agent its grant, possibly again."""
    master = task.agents[task.slots[0]].store
    assert master is not None
    rank, world = task.slots.index(agent.id), len(task.slots)
    turn.send(agent, wire.Grant(round=agent.round, group_rank=rank, group_world=world, master=master))


def send_ranks(task: Task, turn: Turn, agent: Agent) -> None:
    """Send an agent its first global rank and the present world size, possibly again."""
    own = agent.local_world
    assert own is not None
    # Agents of another batch may not have reported their sizes: they are assumed to equal this one.
    sizes = [task.agents[agent_id].local_world or own for agent_id in task.slots]
    base = sum(sizes[: task.slots.index(agent.id)])
    turn.send(agent, wire.Ranks(round=agent.round, base=base, world=sum(sizes)))


def _review_drained(task: Task, turn: Turn) -> None:
    """Restart a plain script without its drained nodes."""
    if not task.plain or task.finishing:
        return
    staying = [agent for agent in task.agents.values() if not turn.drains(agent)]
    if leaving(task, turn) and len(staying) >= task.min_nodes:
        _start_regroup(task, turn, "nodes drain")


def next_in_line(task: Task, turn: Turn) -> list[Agent]:
    """List agents without a slot that may have one, in the order in which they get it."""
    return _one_of_each_place(turn.startable(task.queue()))


def _review_grants(task: Task, turn: Turn) -> None:
    too_few = not task.formed and len(task.agents) < task.min_nodes  # a thousand register one after the other
    if too_few or task.finishing or task.rebuilding or not (queue := next_in_line(task, turn)):
        return
    if not task.formed:
        if len(queue) >= task.min_nodes:
            lifecycle.move(task, slots="granted")
            _grant(task, turn, queue[: task.limit])
        return
    if not task.regrouping:
        taken = queue[: max(0, task.limit - len(undrained(task, turn)))]
        if not taken:
            return
        if not task.plain:
            lifecycle.agents_changed(task)
            _grant(task, turn, taken)
            return
        _start_regroup(task, turn, "a node joins")
    if len(task.queue()) == len(task.agents) and len(queue) >= task.min_nodes:
        lifecycle.move(task, slots="granted")
        _grant(task, turn, queue[: task.limit])
        task.incident = None


def _one_of_each_place(queue: list[Agent]) -> list[Agent]:
    """Keep one agent per place: of two waiting there, the one of an earlier torchrun may be dead."""
    best: dict[str, Agent] = {}
    for agent in sorted(queue, key=lambda agent: agent.conn is None):
        best.setdefault(agent.place or agent.id, agent)
    return [agent for agent in queue if best[agent.place or agent.id] is agent]


def _grant(task: Task, turn: Turn, agents: list[Agent]) -> None:
    task.batches += 1
    for agent in agents:
        task.slots.append(agent.id)
        agent.waiting = False
        agent.holder = True
        agent.batch = task.batches
        if agent.warm:  # its workers already run, under provisional ranks; `registration` welcomes them
            # Before it has reported them it may have missed the warm grant, and wait for its ranks after this one.
            agent.warm, agent.ranked = False, agent.local_world is not None
        else:
            agent.local_world, agent.ranked = None, False
    for agent in agents:
        send_grant(task, turn, agent)
        rank, world = task.slots.index(agent.id), len(task.slots)
        turn.log(
            task,
            SlotGrant(agent=agent.id, node=agent.node, round=agent.round, group_rank=rank, group_world=world),
        )


def _review_ranks(task: Task, turn: Turn) -> None:
    if task.rebuilding:  # the agents with slots are not known yet
        return
    granted = [task.agents[agent_id] for agent_id in task.slots]
    unranked = [agent for agent in granted if not agent.ranked]
    unknown = {agent.batch for agent in granted if agent.local_world is None} if unranked else set()
    for agent in unranked:
        if agent.batch not in unknown:
            agent.ranked = True
            send_ranks(task, turn, agent)


PART: Final = Part(
    receivers=(on(wire.LocalWorld, _local_world), on(wire.StoreUsed, _store_used)),
    review=review_slots,
)
