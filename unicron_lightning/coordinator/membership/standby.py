"""Warm stand-bys: agents without a slot whose workers are started in advance, as far as possible without a slot.

A warm worker has imported everything, run its script up to the strategy's start, and sent its hello. There it waits: it
is neither member nor candidate, counts nowhere, and uses no accelerator memory. When its agent gets a slot the worker
is welcomed, and is as far as other workers are seconds after their start.

Rules:

* Agents are warm when they stand by for a task known to recover in process, also where the plan has given their place
  to another task, which they do not disturb. Agents on drained nodes are not warm, and never those of a plain script,
  whose workers would start to train.
* Warm workers are recorded at the agent (`Agent.hellos`), not in `Task.workers`. So no rule of membership considers
  them, and their death is not a failure of the task.
* A free slot goes to a warm agent first. The agent gets the grant, and its workers their welcome, in one turn.
* A slot whose workers have died is passed on to a warm agent immediately, not only when the slot's own agent is lost:
  that agent has to start new workers in any case. It becomes the stand-by.
"""

from __future__ import annotations

from typing import Final

from unicron_lightning import wire
from unicron_lightning.coordinator.actions import Turn
from unicron_lightning.coordinator.membership import workers
from unicron_lightning.coordinator.membership.slots import leave_slot, next_in_line, review_slots
from unicron_lightning.coordinator.part import Part
from unicron_lightning.coordinator.state import Agent, Task


def review_standbys(task: Task, turn: Turn) -> None:
    """Welcome warm workers of agents that have a slot now; have stand-by agents start theirs. Idempotent.

    Call it after the consequences of deaths are decided: in a new life, the welcomed workers are its founders.
    """
    if task.over is not None:
        return
    if _pass_on(task, turn):
        review_slots(task, turn)
    granted = [task.agents[agent_id] for agent_id in task.slots]
    for agent in [agent for agent in granted if agent.hellos]:
        hellos, agent.hellos = agent.hellos, {}
        for hello in hellos.values():
            workers.hello(task, turn, agent, hello)
    for agent in [agent for agent in task.agents.values() if agent.warm or agent.waiting]:
        if agent.warm and not _may_be_warm(task, turn, agent):
            _cool(task, turn, agent)
        elif agent.waiting and task.formed and not task.finishing and _may_be_warm(task, turn, agent):
            _warm(task, turn, agent)


def send_warm_grant(task: Task, turn: Turn, agent: Agent) -> None:
    """Send an agent a warm grant, possibly again."""
    assert agent.store is not None
    rank = len(task.slots)
    grant = wire.Grant(round=agent.round, group_rank=rank, group_world=rank + 1, master=agent.store, warm=True)
    turn.send(agent, grant)


def resume(task: Task, turn: Turn, agent: Agent, message: wire.Register) -> None:
    """Handle the new registration of a warm agent: warm workers that it does not list are dead."""
    if agent.local_world is None:
        agent.local_world = message.local_world
    named = {info.worker for info in message.workers}
    for worker in [worker for worker in agent.hellos if worker not in named]:
        del agent.hellos[worker]
        agent.gone.append(worker)
    turn.save(task)


def _pass_on(task: Task, turn: Turn) -> bool:
    """Free slots of dead workers, as many as there are warm agents to take them; return whether any were freed.

    A slot whose agent is away is kept: the agent is either declared lost shortly, or has more to report.
    """
    if task.finishing or task.rebuilding or not any(agent.warm for agent in task.agents.values()):
        return False
    spare = [agent for agent in next_in_line(task, turn) if agent.all_warm]
    if not spare:
        return False
    held = [task.agents[agent_id] for agent_id in task.slots if not turn.drains(task.agents[agent_id])]
    dead = [agent for agent in held if agent.gone and agent.conn is not None and not task.workers_of(agent.id)]
    room = max(0, task.limit - len(held))
    given = dead[: max(0, len(spare) - room)]
    for agent in given:
        leave_slot(task, agent)
        turn.emit(task, "slot_passed_on", agent=agent.id, node=agent.node)
    return bool(given)


def _may_be_warm(task: Task, turn: Turn, agent: Agent) -> bool:
    """Whether an agent without a slot may have workers. In a task that is being rebuilt the script is not known yet."""
    may = turn.limits.warm_standby and (task.elastic or task.rebuilding)
    return may and not (agent.departing or turn.lasting.excludes(agent))


def _warm(task: Task, turn: Turn, agent: Agent) -> None:
    if agent.conn is None or task.rebuilding:
        return
    agent.waiting = False
    agent.warm = True
    send_warm_grant(task, turn, agent)
    turn.emit_apart(task, "standby_warms", agent=agent.id, node=agent.node, round=agent.round)


def _cool(task: Task, turn: Turn, agent: Agent) -> None:
    """Have the agent stop its warm workers and stand by without workers."""
    leave_slot(task, agent)
    agent.stopping = True
    turn.send(agent, wire.Stop(reason="its workers are no longer kept warm"))
    turn.emit_apart(task, "standby_cools", agent=agent.id, node=agent.node)


PART: Final = Part(review=review_standbys)
