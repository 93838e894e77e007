"""Agents that were asked to end (SIGTERM): their workers leave at a step boundary, or the task is saved first.

An epoch of kind ``leave`` follows (`epochs`, `slots.leaving`). If fewer than ``min_nodes`` agents remain, their workers
keep the state at that boundary until others join. If all members with the task's state are to leave, e.g. for
maintenance of all nodes, they write a checkpoint first, as for a pause. Workers that have not begun to train, and those
of a plain script with too few other agents, are stopped at once.
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


def _departs(task: Task, turn: Turn, agent: Agent, _: wire.Departing) -> None:
    if agent.departing or task.over is not None:
        return
    agent.departing = True
    turn.places_changed = True
    turn.save(task)
    turn.emit(task, "agent_departs", agent=agent.id, node=agent.node)
    if agent.id not in task.slots:
        return
    if not task.elastic:
        if not (task.plain and len(undrained(task, turn)) >= task.min_nodes):
            _stop(task, turn, agent)
    elif task.epoch is None or task.rebuilding or not state_holders(task):
        _stop(task, turn, agent)
    elif _ends(task):
        save_and_stop(task, turn, "departure")


def _ends(task: Task) -> bool:
    """Whether the state would be lost: all members depart, or each replica of a divided model loses some."""
    going = {agent.id for agent in task.agents.values() if agent.departing}
    replicas: dict[int, set[str]] = {}
    for agent_id, number in whole(task).items():
        replicas.setdefault(number, set()).add(agent_id)
    if task.replica_nodes and replicas:
        return all(agents & going for agents in replicas.values())
    return all(member.agent in going for member in state_holders(task))


def _stop(task: Task, turn: Turn, agent: Agent) -> None:
    revoke(task, turn, agent, "the agent was asked to end before its workers could leave in order", needed=True)


PART: Final = Part(receivers=(on(wire.Departing, _departs),))
