"""Decide whether a node is healthy enough to run workers, and report problems of nodes that are not.

A problem is reported once, when it appears, and handled by the severity of its kind. An agent with a barring problem
gets no slot, logs the reason, and becomes eligible again after a healthy reading. Workers that already run are left
alone: they report errors of their own.
"""

from __future__ import annotations

from unicron_lightning import wire
from unicron_lightning.coordinator.severity import reports
from unicron_lightning.coordinator.state import Agent, Task
from unicron_lightning.coordinator.turn import Turn
from unicron_lightning.detection.health import problems


def told(task: Task, turn: Turn, agent: Agent, message: wire.ErrorReport | wire.NodeReading) -> None:
    """Handle an agent's report of an error or of its node's health."""
    if isinstance(message, wire.NodeReading):
        take(task, turn, agent, message)
    else:
        reports.reported(task, turn, agent, message)


def take(task: Task, turn: Turn, agent: Agent, reading: wire.NodeReading) -> None:
    """Handle an agent's reading of its node's health."""
    now = {problem.check: problem for problem in problems(reading, turn.limits.health)}
    elsewhere = {check for other in task.agents.values() if other.node == agent.node for check in other.problems}
    barred = [problem.cause for problem in now.values() if problem.bars]
    for check, problem in now.items():
        if check not in elsewhere:
            word = wire.ErrorReport(
                worker=None,
                kind=problem.kind,
                cause=problem.cause,
                phase="",
                step=None,
                at=turn.now,
                details={"check": check},
            )
            reports.reported(task, turn, agent, word)
    gone = sorted(set(agent.problems) - set(now))
    agent.problems = list(now)
    if gone:
        turn.emit_for(task, None, "node_well_again", {"agent": agent.id, "node": agent.node, "checks": gone})
    before, agent.unhealthy = agent.unhealthy, "; ".join(barred)
    if before != agent.unhealthy:
        turn.places_changed = True
        turn.decisions.setdefault(task.id, [])  # makes the turn review the task
        turn.send(agent, wire.Barred(reason=agent.barred))
        turn.save(task)
