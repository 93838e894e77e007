"""Records of open incidents: plain structs, kept in `state.Task`.

`accounting` fills them and computes their bills.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from unicron_lightning.coordinator.measured import Level

Phase = Literal["detection", "transition", "sub_healthy"]
PHASES: Final[tuple[Phase, ...]] = ("detection", "transition", "sub_healthy")


class Loss(msgspec.Struct, kw_only=True):
    """A period in which a task had fewer workers at work than it should have had."""

    phase: Phase
    due: Level
    """Size that the task should have had, less the part that an earlier incident accounts for."""
    had: Level
    seconds: float


class Incident(msgspec.Struct, kw_only=True):
    """A failure, with all its consequences."""

    id: str
    cause: str
    fault_at: float
    """time.time() of the failure by the clock of the process that observed it, but not after ``known_at``."""
    known_at: float
    """time.time() at which the coordinator learned of the failure."""
    stepped_at: float | None = None
    """time.time() at which the new world finished its first step."""
    number: int
    """Newest epoch when the failure became known: a first step in a newer one ends the transition."""
    failures: int = 0
    """Workers that died by themselves and agents that were lost, so far."""
    started_with: Level
    due: Level
    """Size that the task must reach again: ``started_with``, less slots removed by later plans."""
    losses: list[Loss] = []


class Accounts(msgspec.Struct, kw_only=True):
    """A task's open incidents, and the data needed to continue their bills."""

    open: list[Incident] = []
    """Open incidents, oldest first."""
    opened: int = 0
    """Number of the newest incident, open or not."""
    level: Level = Level(slots=0, workers=0)
    """Size of the world that finished the newest step."""
    places: int = 0
    """Places allocated to all tasks together when no incident was last open."""
    since: float = 0.0
    """time.time() up to which ``losses`` are recorded."""
