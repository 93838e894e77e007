"""What a simulation has found: WAF over time, and where everybody's time went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

State = Literal["useful", "overhead", "recomputing", "detecting", "transition", "idle", "repairing"]
STATES: Final[tuple[State, ...]] = (
    "useful",
    "overhead",
    "recomputing",
    "detecting",
    "transition",
    "idle",
    "repairing",
)
"""What a worker is doing:

* ``useful``: its task gets further than it ever was; ``overhead``: the part of that time that the system takes;
* ``recomputing``: its task does again what was done before;
* ``detecting``: its task stands still, and nobody knows why yet; ``transition``: and is being set right;
* ``idle``: it could work and has no task, or its task cannot use it or waits for others;
* ``repairing``: its node is down.
"""

Phase = Literal["detection", "transition", "sub_healthy"]
PHASES: Final[tuple[Phase, ...]] = ("detection", "transition", "sub_healthy")
Loss = Literal["detection", "transition", "sub_healthy", "overhead"]
LOSSES: Final[tuple[Loss, ...]] = ("detection", "transition", "sub_healthy", "overhead")
MICRO: Final = 1_000_000
"""Times are counted in whole microseconds, so that sums are exact."""


@dataclass(frozen=True, kw_only=True)
class Incident:
    """A failure of a task, with all that follows.

    Attributes:
        task: whose.
        kind: of the fault.
        at: when it struck, seconds.
        known_at: when the system had heard of it; None: not before the end.
        running_at: when the task made steps again; None: not before the end.
        seconds: by phase; sub-healthy until it has as many places as it would have had.
        waf_seconds: weighted FLOP that were not done, by phase. Steps done again are in ``transition``.
    """

    task: str
    kind: str
    at: float
    known_at: float | None
    running_at: float | None
    seconds: Mapping[Phase, float]
    waf_seconds: Mapping[Phase, float]


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """A task's share.

    Attributes:
        name: its name.
        flops: done, each step counted once.
        weight: w(t).
        present: seconds for which it was there.
        steps: done.
        worker_micros: microseconds of its workers by state; ``idle`` are those that wait with it, ``repairing`` none.
        goodput: flops, as part of those that it would have done on the workers of the ideal.
        ettr: part of its time in which it made steps that counted (effective training time ratio).
    """

    name: str
    flops: float
    weight: float
    present: float
    steps: float
    worker_micros: Mapping[State, int]
    goodput: float
    ettr: float


@dataclass(frozen=True, kw_only=True)
class Result:
    """Of one policy on one trace.

    Attributes:
        policy: its name.
        trace: the trace's name.
        seconds: how long was simulated.
        times: seconds at which WAF changes, from 0.0 on, rising.
        values: WAF from then on, weighted FLOP/s.
        ideal: accumulated WAF without failures or changes' costs, by the planner's allocation [weighted FLOP].
        worker_micros: microseconds of all workers by state; their sum is ``seconds`` x workers.
        lost: what the ideal has done and this has not, by why; the sum is ``ideal`` less the accumulated WAF. Steps
            done again are in ``transition``, tasks with fewer nodes than in the ideal in ``sub_healthy``.
        tasks: by name.
        incidents: in the order of their beginnings.
        counts: what else was counted, e.g. ``epochs``, ``plans``, ``restarts``.
    """

    policy: str
    trace: str
    seconds: float
    times: NDArray[np.float64]
    values: NDArray[np.float64]
    ideal: float
    worker_micros: Mapping[State, int]
    lost: Mapping[Loss, float]
    tasks: Mapping[str, TaskResult]
    incidents: tuple[Incident, ...]
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def accumulated_waf(self) -> float:
        """Weighted FLOP that were done and counted."""
        return float(np.sum(np.diff(np.append(self.times, self.seconds)) * self.values))

    @property
    def of_ideal(self) -> float:
        """Accumulated WAF as part of the ideal."""
        return self.accumulated_waf / self.ideal if self.ideal else 1.0

    def total(self, phase: Phase, of: Literal["seconds", "waf_seconds"] = "waf_seconds") -> float:
        """Sum over all incidents."""
        return sum(float(getattr(incident, of)[phase]) for incident in self.incidents)
