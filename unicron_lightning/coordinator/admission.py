"""Whether a node is well enough to have workers, and what is told of one that is not.

A problem is told once, when it appears, and answered by the severity of its kind; an agent with one that bars gets no
slot, knows why from its log, and gets one when a later reading is well. Workers that run already are left alone:
whether they suffer they tell themselves.
"""

from __future__ import annotations

from unicron_lightning import wire
from unicron_lightning.coordinator.severity import reports
from unicron_lightning.coordinator.state import Agent, Task
from unicron_lightning.coordinator.turn import Turn
from unicron_lightning.detection.health import problems


def told(task: Task, turn: Turn, agent: Agent, message: wire.ErrorReport | wire.NodeReading) -> None:
    """An agent tells of an error, or how its node is."""
    if isinstance(message, wire.NodeReading):
        take(task, turn, agent, message)
    else:
        reports.reported(task, turn, agent, message)


def take(task: Task, turn: Turn, agent: Agent, reading: wire.NodeReading) -> None:
    """An agent tells how its node is."""
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
        turn.decisions.setdefault(task.id, [])  # the task is to be looked at
        turn.send(agent, wire.Barred(reason=agent.barred))
        turn.save(task)
