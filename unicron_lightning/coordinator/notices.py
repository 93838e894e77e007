"""Events of the task's log that are sent to workers, for callbacks that display them (`wire.Notice`).

Every event of an incident is sent (the failure, the reaction, the cost), and events about slowness. Epochs are not,
because workers receive them anyway, nor are reports of other workers about themselves.
Notices are sent last, so that no recovery waits for them; an agent that is away does not receive them later.
"""

from __future__ import annotations

from typing import Final

from unicron_lightning import wire
from unicron_lightning.coordinator.membership import concerned
from unicron_lightning.coordinator.turn import Turn

_KNOWN: Final = ("epoch_published", "epoch_settled")
_ALSO: Final = ("task_degraded", "task_normal", "straggler", "straggler_over")
"""Names of events that are sent although they belong to no incident."""


def tell(turn: Turn) -> None:
    """Send the events logged in this turn to the agents of their tasks."""
    for task, event in turn.news:
        of_incident = event.incident is not None and event.name not in _KNOWN and not event.name.startswith("worker.")
        if of_incident or event.name in _ALSO:
            notice = wire.Notice(name=event.name, at=turn.now, incident=event.incident, fields=event.fields)
            for agent_id in concerned(task):
                if (agent := task.agents.get(agent_id)) is not None:
                    turn.send(agent, notice)
