"""The machine's parts in their order, and the calls of their rules.

The order is that of reviews: who may run (`connectivity`), who runs (`slots`), who trains together (`epochs`),
and the consequences. Of two parts that handle a message, `severity` comes first: it sees the task before `workers`
changes it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final

import msgspec

from unicron_lightning import wire
from unicron_lightning.coordinator import connectivity, hangs
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.actions import Part, Turn
from unicron_lightning.coordinator.incidents import accounting
from unicron_lightning.coordinator.membership import epochs, memory, registration, slots, workers
from unicron_lightning.coordinator.orders import calibration, jobs
from unicron_lightning.coordinator.severity import apply as severity
from unicron_lightning.coordinator.state import Agent, Task

PARTS: Final[tuple[Part, ...]] = (
    connectivity.PART,
    slots.PART,
    epochs.PART,
    epochs.DEPARTURES,
    connectivity.ENTRIES,
    registration.STANDBY,
    registration.PART,
    severity.PART,
    memory.PART,
    workers.PART,
    epochs.REBUILDING,
    epochs.HOLDS,
    severity.REPORTS,
    hangs.PART,
    jobs.PART,
    calibration.PART,
    accounting.PART,
)


def _receivers() -> dict[type[msgspec.Struct], list[Callable[[Task, Turn, Agent, Any], None]]]:
    rules = defaultdict(list)
    for part in PARTS:
        for kind, rule in part.receivers:
            rules[kind].append(rule)
    return dict(rules)


RECEIVERS: Final = _receivers()
"""Rules for messages by their type."""
_TIMERS: Final = {kind: rule for part in PARTS for kind, rule in part.timers.items()}
_AGENT_TIMERS: Final = {kind: rule for part in PARTS for kind, rule in part.agent_timers.items()}
_REVIEWS: Final = [part.review for part in PARTS if part.review is not None]
_RECORDS: Final = [part.record for part in PARTS if part.record is not None]


def restore(task: Task, turn: Turn) -> None:
    """Continue with a task as stored."""
    for part in PARTS:
        if part.restore is not None:
            part.restore(task, turn)


def receive(task: Task, turn: Turn, agent: Agent, message: wire.FromAgent) -> None:
    """Handle a message of a registered agent."""
    for rule in RECEIVERS[type(message)]:
        rule(task, turn, agent, message)


def timer_fired(task: Task, turn: Turn, key: ev.TimerKey) -> bool:
    """Handle a timer of a task; return whether the task has to be reviewed."""
    if (rule := _TIMERS.get(key.kind)) is not None:
        rule(task, turn)
        return True
    agent = task.agents.get(key.agent)
    return agent is None or _AGENT_TIMERS[key.kind](task, turn, agent) is not False


def review(task: Task, turn: Turn) -> None:
    """Carry out the steps that are due for a task now."""
    again = True
    while again:
        again = False
        for rule in _REVIEWS:
            again = rule(task, turn) is True or again


def record(task: Task, turn: Turn, event: ev.Emit) -> None:
    """Update measurements and accounts by an event of the task's log."""
    for rule in _RECORDS:
        rule(task, turn, event)
