"""Results of a simulation, WAF over time and the use of all workers' time; and the virtual clock of a run.

The clock is a queue of calls at times in whole microseconds. Calls at the same moment are ordered: faults, then
repairs, departures and arrivals, each in the trace's order; then consequences of earlier calls, in the order in which
they were scheduled. So a run is deterministic.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from unicron_lightning.coordinator.incidents.facts import IncidentPhase

WorkerState = Literal["useful", "overhead", "recomputing", "detecting", "transition", "idle", "repairing"]
STATES: Final[tuple[WorkerState, ...]] = get_args(WorkerState)
"""States of a worker:

* ``useful``: its task gets further than it ever was; ``overhead``: the part of that time that the system takes;
* ``recomputing``: its task repeats earlier work;
* ``detecting``: its task is interrupted, with the cause still undetected; ``transition``: its task is being recovered;
* ``idle``: it could work and has no task, or its task cannot use it or waits for others;
* ``repairing``: its node is down.
"""

LossKind = Literal["detection", "transition", "sub_healthy", "overhead"]
LOSSES: Final[tuple[LossKind, ...]] = get_args(LossKind)
MICRO: Final = 1_000_000
"""Times are counted in whole microseconds, so that sums are exact."""


@dataclass(frozen=True, kw_only=True)
class SimIncident:
    """A failure of a task, with all its consequences.

    Attributes:
        task: the task.
        kind: kind of the fault.
        at: time of the fault, seconds.
        known_at: time of its detection; None: not before the end.
        running_at: time at which the task made steps again; None: not before the end.
        seconds: duration by phase; sub-healthy lasts until the task has as many places as it would have had.
        waf_seconds: weighted FLOP that were not done, by phase. Repeated steps are in ``transition``.
    """

    task: str
    kind: str
    at: float
    known_at: float | None
    running_at: float | None
    seconds: Mapping[IncidentPhase, float]
    waf_seconds: Mapping[IncidentPhase, float]


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """Results of one task.

    Attributes:
        name: its name.
        flops: finished FLOP, each step counted once.
        weight: w(t).
        present: seconds between its arrival and its end.
        steps: finished steps.
        samples: samples of these steps; None: unknown.
        worker_micros: microseconds of its workers by state; ``idle`` are those that wait with it, ``repairing`` none.
        goodput: finished FLOP as a fraction of the ideal's.
        ettr: fraction of its time in which it made counted steps (effective training time ratio).
    """

    name: str
    flops: float
    weight: float
    present: float
    steps: float
    samples: float | None
    worker_micros: Mapping[WorkerState, int]
    goodput: float
    ettr: float


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """Results of one policy on one trace.

    Attributes:
        policy: its name.
        trace: the trace's name.
        seconds: simulated duration.
        times: seconds at which WAF changes, from 0.0 on, rising.
        values: WAF from each of these times on, weighted FLOP/s.
        ideal: accumulated WAF without failures or costs of changes, by the planner's allocation [weighted FLOP].
        worker_micros: microseconds of all workers by state; their sum is ``seconds`` x workers.
        lost: WAF missing relative to the ideal, by reason; the sum is ``ideal`` less the accumulated WAF. Repeated
        steps
            are in ``transition``, tasks with fewer nodes than in the ideal in ``sub_healthy``.
        tasks: by name.
        incidents: in the order of their start.
        counts: other counters, e.g. ``epochs``, ``plans``, ``restarts``.
    """

    policy: str
    trace: str
    seconds: float
    times: NDArray[np.float64]
    values: NDArray[np.float64]
    ideal: float
    worker_micros: Mapping[WorkerState, int]
    lost: Mapping[LossKind, float]
    tasks: Mapping[str, TaskResult]
    incidents: tuple[SimIncident, ...]
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def accumulated_waf(self) -> float:
        """Weighted FLOP that were done and counted."""
        return float(np.sum(np.diff(np.append(self.times, self.seconds)) * self.values))

    @property
    def of_ideal(self) -> float:
        """Accumulated WAF as a fraction of the ideal."""
        return self.accumulated_waf / self.ideal if self.ideal else 1.0


FAULT: Final = 0
REPAIR: Final = 1
DEPARTURE: Final = 2
ARRIVAL: Final = 3
CONSEQUENCE: Final = 4


class Clock:
    """A queue of calls. ``now`` is in microseconds from the beginning of the trace; negative before it."""

    def __init__(self, start: int = 0) -> None:
        self.now = start
        self._queue: list[tuple[int, int, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    @property
    def seconds(self) -> float:
        """The time in seconds."""
        return self.now / MICRO

    def at(self, moment: int, call: Callable[[], None], rank: int = CONSEQUENCE) -> int:
        """Schedule a call at a time (in microseconds), or now if the time has passed; return its number."""
        number = next(self._numbers)
        heapq.heappush(self._queue, (max(moment, self.now), rank, number, call))
        return number

    def after(self, seconds: float, call: Callable[[], None]) -> int:
        """Schedule a call after a number of seconds; return its number."""
        return self.at(self.now + micros(seconds), call)

    def run(self, until: int) -> None:
        """Run all calls due before a time, then set the clock to that time."""
        queue = self._queue
        while queue and queue[0][0] < until:
            self.now, _, _, call = heapq.heappop(queue)
            call()
        self.now = until


def micros(seconds: float) -> int:
    """Convert seconds to whole microseconds."""
    return round(seconds * MICRO)
