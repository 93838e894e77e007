"""What is written down of an incident while it is open: plain structs, kept in `state.Task`.

`accounting` fills them and makes their bill.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from unicron_lightning.coordinator.measured import Level

Phase = Literal["detection", "transition", "sub_healthy"]
PHASES: Final[tuple[Phase, ...]] = ("detection", "transition", "sub_healthy")


class Loss(msgspec.Struct, kw_only=True):
    """So long a task had fewer workers at work than it should have had."""

    phase: Phase
    due: Level
    """What it should have had; less whatever an earlier incident answers for."""
    had: Level
    seconds: float


class Incident(msgspec.Struct, kw_only=True):
    """A failure, with all that follows from it."""

    id: str
    cause: str
    fault_at: float
    """When it happened, by the clock of whoever saw it, but not after ``known_at``; time.time() like all times here."""
    known_at: float
    """When the coordinator heard of it."""
    stepped_at: float | None = None
    """When the new world had finished its first step."""
    number: int
    """Newest epoch when it became known: a first step in a newer one ends the transition."""
    failures: int = 0
    """Workers that died by themselves and agents that were lost, so far."""
    started_with: Level
    due: Level
    """What the task has to have again: ``started_with``, less what was taken from it by plan since."""
    losses: list[Loss] = []


class Accounts(msgspec.Struct, kw_only=True):
    """A task's open incidents, and what is needed to go on with their bills."""

    open: list[Incident] = []
    """In the order in which they began."""
    opened: int = 0
    """Number of the newest incident, open or not."""
    level: Level = Level(slots=0, workers=0)
    """The world that finished the newest step."""
    places: int = 0
    """Places that the plan gave out, to all tasks together, when no incident was open last."""
    since: float = 0.0
    """Up to when ``losses`` are written."""
