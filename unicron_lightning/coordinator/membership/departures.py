"""Agents that were asked to end (SIGTERM): their workers leave at a step boundary, or the task is saved first.

If enough nodes remain, an epoch of kind ``leave`` follows (`slots.leaving`). If all members with the task's state are
to leave, e.g. for maintenance of all nodes, they write a checkpoint first, as for a pause. If only some are, and too
few would remain, the others keep the state and wait; those that leave are stopped once it is clear that not all do.
"""

from __future__ import annotations

from typing import Final

from unicron_lightning import wire
from unicron_lightning.coordinator.actions import Turn
from unicron_lightning.coordinator.membership.epochs import save_and_stop, state_holders
from unicron_lightning.coordinator.membership.replicas import whole
from unicron_lightning.coordinator.membership.slots import revoke, undrained
from unicron_lightning.coordinator.part import Part, on
from unicron_lightning.coordinator.state import Agent, Task

_TOGETHER_SECONDS: Final = 2.0
"""Seconds after the first SIGTERM in which those of the other nodes arrive, if all nodes are to end."""


def _departs(task: Task, turn: Turn, agent: Agent, _: wire.Departing) -> None:
    if agent.departing or task.over is not None:
        return
    agent.departing = True
    turn.places_changed = True
    turn.save(task)
    turn.emit(task, "agent_departs", agent=agent.id, node=agent.node)
    if agent.id not in task.slots or task.plain or _spared(task, turn):
        return
    if task.epoch is None or task.rebuilding or not state_holders(task):
        _stop(task, turn, agent)
    elif _ends(task):
        save_and_stop(task, turn, "departure")
    else:
        _await_others(task, turn)


def _spared(task: Task, turn: Turn) -> bool:
    """Whether the task continues without the agents that depart."""
    return task.elastic and len(undrained(task, turn)) >= task.min_nodes


def _ends(task: Task) -> bool:
    """Whether the state would be lost: all members depart, or each replica of a divided model loses some."""
    going = {agent.id for agent in task.agents.values() if agent.departing}
    replicas: dict[int, set[str]] = {}
    for agent_id, number in whole(task).items():
        replicas.setdefault(number, set()).add(agent_id)
    if task.replica_nodes and replicas:
        return all(agents & going for agents in replicas.values())
    return all(member.agent in going for member in state_holders(task))


def _await_others(task: Task, turn: Turn) -> None:
    turn.timer("departure", _TOGETHER_SECONDS, task=task.id)


def _together_over(task: Task, turn: Turn) -> None:
    """Stop the agents that depart, if not all do: the others wait for replacements."""
    if task.pausing or task.over is not None or _spared(task, turn):
        return
    for agent_id in list(task.slots):
        if (agent := task.agents[agent_id]).departing:
            _stop(task, turn, agent)


def _stop(task: Task, turn: Turn, agent: Agent) -> None:
    revoke(task, turn, agent, "the agent was asked to end, and too few others remain", needed=True)


def _restore(task: Task, turn: Turn) -> None:
    if any(task.agents[agent_id].departing for agent_id in task.slots):
        _await_others(task, turn)


PART: Final = Part(restore=_restore, receivers=(on(wire.Departing, _departs),), timers={"departure": _together_over})
