"""What was measured of a task while it ran: plain structs, kept in `state.Task` and so known to the next coordinator.

`measuring` fills them, `throughput` makes the planner's inputs of them.
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
    """How long a step takes at one size, as measured last."""

    workers: int
    seconds: float
    """Of a step, > 0."""
    spread: float
    """Relative standard deviation of a single interval, robustly estimated."""
    intervals: int
    """How many were measured."""
    at: float
    """time.time() of the newest."""


class Pace(msgspec.Struct, kw_only=True):
    """The measurement in progress: of one settled epoch."""

    epoch: int = 0
    level: Level = Level(slots=0, workers=0)
    before: Level = Level(slots=0, workers=0)
    """Of the epoch settled before it."""
    stands: bool = False
    """A newer epoch was published: its step is none to measure."""
    step: int = 0
    """The newest step that does not count: finished before the epoch, or by its transition."""
    worker: str = ""
    """Whose reports count; the first to finish a step in the epoch. Members step together: one is enough."""
    at: float = 0.0
    """When it had finished ``step``, by its clock."""
    seconds: list[float] = []
    """Per step, in the newest intervals between two of its reports."""


class MeasuredTransition(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the task's world, from its beginning to the first step finished after it."""

    kind: TransitionName
    seconds: float
    at: float
    """time.time() of its end."""


class Lifetimes(msgspec.Struct, kw_only=True):
    """What ran for how long, and what of it failed."""

    workers_lost: int = 0
    """Processes that died by themselves; not those that went with their node."""
    slots_lost: int = 0
    """Agents lost."""
    worker_seconds: float = 0.0
    slot_seconds: float = 0.0


class Measured(msgspec.Struct, kw_only=True):
    """All that was measured of a task."""

    flops_per_step: float | None = None
    """As the workers tell."""
    pace: Pace = msgspec.field(default_factory=Pace)
    speeds: dict[int, Speed] = {}
    """By number of slots."""
    transitions: list[MeasuredTransition] = []
    """The newest, oldest first."""
    lifetimes: Lifetimes = msgspec.field(default_factory=Lifetimes)
    level: Level = Level(slots=0, workers=0)
    """What runs since ``since``, and is not counted in `lifetimes` yet."""
    since: float = 0.0
    begun: float = 0.0
    """When the transition in progress began; 0 if none is."""
