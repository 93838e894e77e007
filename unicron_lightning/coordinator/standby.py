"""Warm stand-bys: agents without a slot whose workers are started all the same, as far as goes without one.

A warm worker has imported everything and run its script up to the strategy's start, and has said hello. There it waits:
it is no member and no candidate, counts nowhere, and has nothing on its accelerator. When its agent gets a slot it is
welcomed, and is as far as others are seconds after their start.

Rules:

* Warm are the agents that stand by for a task known to recover in process, also where the plan has given their place to
  another task: what uses that place is not touched. Not on a node that an operator has drained, and never for a plain
  script, whose workers would begin to work.
* Their workers are on record at the agent (`Agent.hellos`), not in `Task.workers`. So no rule of membership sees them,
  and their death is nobody's failure.
* A free slot goes to a warm agent first. It gets the grant, and its workers their welcome, in one turn.
* A slot whose workers have died is passed on to a warm agent at once, not only when the slot's own agent is lost: that
  agent has to start its workers from nothing in any case. It becomes the stand-by.
"""

from __future__ import annotations

from unicron_lightning import wire
from unicron_lightning.coordinator import workers
from unicron_lightning.coordinator.slots import leave_slot, next_in_line, review_slots
from unicron_lightning.coordinator.state import Agent, Task
from unicron_lightning.coordinator.turn import Turn


def review_standbys(task: Task, turn: Turn) -> None:
    """Welcome the warm workers of agents that have a slot now; have those that stand by warm theirs. Idempotent.

    To be called when it is settled what follows from deaths: if that is a new life, those welcomed are its founders.
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
    """Tell an agent to warm its workers (again)."""
    assert agent.store is not None
    rank = len(task.slots)
    grant = wire.Grant(round=agent.round, group_rank=rank, group_world=rank + 1, master=agent.store, warm=True)
    turn.send(agent, grant)


def resume(task: Task, turn: Turn, agent: Agent, message: wire.Register) -> None:
    """A warm agent has registered again: warm workers that it does not name are dead."""
    if agent.local_world is None:
        agent.local_world = message.local_world
    named = {info.worker for info in message.workers}
    for worker in [worker for worker in agent.hellos if worker not in named]:
        del agent.hellos[worker]
        agent.gone.append(worker)
    turn.save(task)


def _pass_on(task: Task, turn: Turn) -> bool:
    """Free as many slots of dead workers as there are warm agents to take them; whether there were any.

    One whose agent is away is left alone: it is lost in a moment, or has more to tell.
    """
    if task.finishing or task.rebuilding:
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
    """Whether an agent without a slot may have workers. In a task that is rebuilt the script is not known yet."""
    lasting = turn.lasting
    drained = agent.node in lasting.drained or agent.id in lasting.drained or agent.node in lasting.cordoned
    return turn.limits.warm_standby and (task.elastic or task.rebuilding) and not drained


def _warm(task: Task, turn: Turn, agent: Agent) -> None:
    if agent.conn is None or task.rebuilding:
        return
    agent.waiting = False
    agent.warm = True
    send_warm_grant(task, turn, agent)
    turn.emit_for(task, None, "standby_warms", {"agent": agent.id, "node": agent.node, "round": agent.round})


def _cool(task: Task, turn: Turn, agent: Agent) -> None:
    """Have the agent stop its warm workers and stand by without."""
    leave_slot(task, agent)
    agent.stopping = True
    turn.send(agent, wire.Stop(reason="its workers are not to be warm any more"))
    turn.emit_for(task, None, "standby_cools", {"agent": agent.id, "node": agent.node})
