"""What workers are told of their task's event log, for the callbacks that show it (`wire.Notice`).

Every line that belongs to an incident: that something failed, what was done about it, what it has cost; and what is
slow. Not the epochs, of which workers are told in any case, and nothing that other workers say of their own part.
Notices go out last, so that no recovery waits for them; whoever is away does not get them later.
"""

from __future__ import annotations

from typing import Final

from unicron_lightning import wire
from unicron_lightning.coordinator.membership import concerned
from unicron_lightning.coordinator.turn import Turn

_KNOWN: Final = ("epoch_published", "epoch_settled")
_ALSO: Final = ("task_degraded", "task_normal", "straggler", "straggler_over")
"""Told though they belong to no incident."""


def tell(turn: Turn) -> None:
    """Send what was logged in this turn to the agents of the tasks that it is about."""
    for task, event in turn.news:
        of_incident = event.incident is not None and event.name not in _KNOWN and not event.name.startswith("worker.")
        if of_incident or event.name in _ALSO:
            notice = wire.Notice(name=event.name, at=turn.now, incident=event.incident, fields=event.fields)
            for agent_id in concerned(task):
                if (agent := task.agents.get(agent_id)) is not None:
                    turn.send(agent, notice)
