"""Measurements of a running task, and records of its open incidents: plain structs, kept in `state.Task`.

`measurements` and `accounting` fill them. `accounting` derives a `Bill` from an incident, `allocation.estimates` the
planner's inputs from the measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, TypeVar

import msgspec

TransitionName = Literal["shrink_in_place", "grow_in_place", "restart", "reconfigure_cold"]
"""Kinds of a change of a task's workers.

``shrink_in_place``, ``grow_in_place``: workers leave or join, the others keep their processes and state. ``restart``:
processes are restarted on the same workers, in the same configuration. ``reconfigure_cold``: the task starts from a
checkpoint in another parallel configuration, or for the first time.
"""


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """The size of a world."""

    slots: int
    workers: int


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Duration of a step at one size, as measured last."""

    workers: int
    seconds: float
    """Duration of a step, > 0."""
    spread: float
    """Relative standard deviation of a single interval, robustly estimated."""
    intervals: int
    """Number of measured intervals."""
    at: float
    """time.time() of the newest measurement."""


class SpeedMeasurement(msgspec.Struct, kw_only=True):
    """The measurement in progress, of one settled epoch."""

    epoch: int = 0
    level: Level = Level(slots=0, workers=0)
    before: Level = Level(slots=0, workers=0)
    """Size of the previously settled epoch."""
    stands: bool = False
    """Whether a newer epoch was published, so that the measurement is suspended."""
    step: int = 0
    """Newest step that does not count: finished before the epoch, or by its transition."""
    worker: str = ""
    """Worker whose reports count: the first to finish a step in the epoch. Members step together, so one is enough."""
    at: float = 0.0
    """time.time() at which the worker finished ``step``, by its own clock."""
    seconds: list[float] = []
    """Seconds per step, in the newest intervals between two reports."""


class MeasuredTransition(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the task's world, from its beginning to the first step finished after it."""

    kind: TransitionName
    seconds: float
    at: float
    """time.time() of its end."""


class Lifetimes(msgspec.Struct, kw_only=True):
    """Run times and failures of workers and slots."""

    workers_lost: int = 0
    """Processes that died by themselves; not those lost with their node."""
    slots_lost: int = 0
    """Number of agents lost."""
    worker_seconds: float = 0.0
    slot_seconds: float = 0.0


class Measured(msgspec.Struct, kw_only=True):
    """All measurements of a task."""

    flops_per_step: float | None = None
    """FLOPs per step, as reported by the workers."""
    pace: SpeedMeasurement = msgspec.field(default_factory=SpeedMeasurement)
    speeds: dict[int, Speed] = {}
    """Step times by number of slots."""
    transitions: list[MeasuredTransition] = []
    """The newest transitions, oldest first."""
    lifetimes: Lifetimes = msgspec.field(default_factory=Lifetimes)
    level: Level = Level(slots=0, workers=0)
    """Size that has been running since ``since`` and is not counted in `lifetimes` yet."""
    since: float = 0.0
    begun: float = 0.0
    """time.time() at which the transition in progress began; 0 if there is none."""


IncidentPhase = Literal["detection", "transition", "sub_healthy"]
PHASES: Final[tuple[IncidentPhase, ...]] = ("detection", "transition", "sub_healthy")


class Loss(msgspec.Struct, kw_only=True):
    """A period in which a task had fewer workers at work than it should have had."""

    phase: IncidentPhase
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

    @property
    def phase(self) -> IncidentPhase:
        """The present phase; detection is over when an incident is known."""
        return "transition" if self.stepped_at is None else "sub_healthy"


class PhaseCost(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of a phase of an incident."""

    seconds: float
    worker_seconds: float
    """Missing workers x seconds, weighted."""
    waf_seconds: float | None
    """Missing FLOP, weighted; None if unknown."""


class Bill(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of an incident: docs/monitoring.md defines each number. Times are time.time()."""

    cause: str
    failures: int
    fault_at: float
    known_at: float
    stepped_at: float | None
    slots_before: int
    workers_before: int
    weight: float
    flops_per_step: float | None
    phases: dict[IncidentPhase, PhaseCost]


_Capacity = TypeVar("_Capacity")


def left_to(dues: Sequence[_Capacity], place: int, present: _Capacity) -> _Capacity:
    """Return the capacity for which one of several open incidents, oldest first, does not account, given their dues.

    Each accounts only for the capacity that the next one found, so nothing is counted twice; the newest for all that is
    missing from the ``present`` capacity.
    """
    return dues[place + 1] if place + 1 < len(dues) else present


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
