"""Times of faults with a rate: Poisson processes that a seed makes repeatable."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from unicron_lightning.faults.fault import SECONDS_PER_HOUR, Fault


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
