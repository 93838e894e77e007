"""Times of faults: Poisson processes that a seed makes repeatable, and the due times of a fault in a worker.

The latter are decided at the points that the worker's program passes. No clock, nothing of torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Final

from unicron_lightning.faults.fault import IN_BACKWARD, SECONDS_PER_HOUR, Fault


def draw(fault: Fault, *names: object, seed: int = 0) -> Random:
    """Return a fault's source of random numbers, the same for the same names.

    Args:
        fault: its own seed counts, if it has one.
        names: distinguish this use, e.g. the fault's place in a list.
        seed: seed of the injection.
    """
    own = seed if fault.seed is None else fault.seed
    return Random("/".join(map(str, (own, *names))))


def arrivals(fault: Fault, *names: object, seed: int = 0) -> Iterator[float]:
    """Iterate over seconds from the start at which a fault is due: by its rate, or ``times`` times after ``after``.

    A fault that waits for a step is due like any other, and strikes when the step comes.
    """
    random, at, struck = draw(fault, *names, seed=seed), fault.after or 0.0, 0
    while fault.most is None or struck < fault.most:
        if fault.rate is not None:
            at += random.expovariate(fault.rate / SECONDS_PER_HOUR)
        yield at
        struck += 1


class RateClock:
    """The clock of a process whose rate changes, e.g. for one of n workers that share a task's rate.

    Args:
        random: a source made by `draw`.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._left = random.expovariate(1.0)

    def passed(self, expected: float) -> int:
        """Return the number of strikes due after a time in which ``expected`` strikes are expected."""
        due = 0
        self._left -= expected
        while self._left <= 0:
            due += 1
            self._left += self._random.expovariate(1.0)
        return due


SCRIPT: Final = "script"
"""The phase of a point of the script's own."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """The present point of a worker's program.

    Attributes:
        phase: one of `fault.PHASES`, or `SCRIPT`.
        name: name of a point of the script's own; None at others.
        index: index of the micro-batch among those that it computes in the step, or of the bucket; None at other
        points.
            At a point of the script's own: the micro-batch that began last.
        step: optimizer steps finished when the present one began.
        rank: its global rank.
        nodes: the node of each member of its world, by rank.
        has_state: whether it is no longer a joiner.
        at: seconds since the injection began in this process.
    """

    phase: str
    name: str | None = None
    index: int | None
    step: int
    rank: int
    nodes: tuple[str, ...]
    has_state: bool
    at: float


class FaultTimer:
    """Watches for the moments of one fault in one worker.

    Args:
        fault: the fault.
        choice: at least 0 and below 1: selects the victim, the same in all workers.
        random: source of randomness for a rate, this worker's own.
    """

    def __init__(self, fault: Fault, choice: float, random: Random) -> None:
        self.fault = fault
        self.over = False
        """Whether it will never be due again: it has struck for the last time, here or in another worker."""
        self.struck = 0
        """Number of strikes in this worker."""
        self._choice = choice
        self._hazard = None if fault.rate is None else RateClock(random)
        self._since = fault.after or 0.0
        self._pending = 0
        self._phase, self._index = _phase_of(fault)

    def due(self, point: Point) -> bool:
        """Whether it strikes at this point; to be called at each point, in order."""
        fault = self.fault
        if self.over or point.at < self._since:
            return False
        if self._hazard is not None:
            self._pending += self._hazard.passed(self._expected(fault, point))
            self._since = point.at
            if self._pending == 0 or not self._fits(point):
                return False
            self._pending -= 1
            return True
        return self._fits(point) and point.rank in fault.victims(point.nodes, self._choice)

    def _fits(self, point: Point) -> bool:
        fault = self.fault
        return (
            self._phase in (None, point.phase)
            and self._index in (None, point.index)
            and fault.point in (None, point.name)
            and fault.world in (None, len(point.nodes))
            and fault.step in (None, point.step)
            and (fault.from_step is None or point.step >= fault.from_step)
            and not (fault.joiner and point.has_state)
        )

    def _expected(self, fault: Fault, point: Point) -> float:
        """Return the strikes expected of this worker since the last point: its share of the task's rate."""
        fitting = [rank for rank, node in enumerate(point.nodes) if fault.node in (None, node)]
        if fault.rank is None:
            share = 1 / len(fitting) if point.rank in fitting else 0.0
        else:
            share = float(point.rank in fault.victims(point.nodes, 0.0))
        assert fault.rate is not None
        return share * fault.rate / SECONDS_PER_HOUR * (point.at - self._since)


def _phase_of(fault: Fault) -> tuple[str | None, int | None]:
    """Return the phase and the index at which it strikes; None: any."""
    if fault.kind in IN_BACKWARD:
        return "forward", fault.micro_batch
    if fault.point is not None:
        return SCRIPT, fault.micro_batch
    if fault.bucket is not None:
        return "launched", fault.bucket
    if fault.micro_batch is not None:
        return fault.phase or "micro_batch", fault.micro_batch
    return fault.phase, None
