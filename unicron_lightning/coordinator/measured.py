"""Measurements of a running task: plain structs, kept in `state.Task` and so preserved for the next coordinator.

`measuring` fills them; `throughput` derives the planner's inputs from them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

TransitionName = Literal["shrink_in_place", "grow_in_place", "restart", "reconfigure_cold"]
"""Values of `unicron_lightning.planner.transitions.TransitionKind`."""


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


class Pace(msgspec.Struct, kw_only=True):
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
    pace: Pace = msgspec.field(default_factory=Pace)
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
