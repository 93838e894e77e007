"""The virtual clock: what is to happen when, in whole microseconds.

At one moment things happen in this order: faults, then repairs, departures and arrivals, all in the trace's order; then
what follows from earlier things, in the order in which it was put down. So a run has one history.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Final

from unicron_lightning.simulate.result import MICRO

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
        """Have something happen at a time (in microseconds), or now if that has passed; returns its number."""
        number = next(self._numbers)
        heapq.heappush(self._queue, (max(moment, self.now), rank, number, call))
        return number

    def after(self, seconds: float, call: Callable[[], None]) -> int:
        """Have something happen in so many seconds; returns its number."""
        return self.at(self.now + micros(seconds), call)

    def run(self, until: int) -> None:
        """Let everything happen that is due before a time, and have it be that time."""
        queue = self._queue
        while queue and queue[0][0] < until:
            self.now, _, _, call = heapq.heappop(queue)
            call()
        self.now = until

    @property
    def next_at(self) -> int | None:
        """When the next thing happens; None if nothing will."""
        return self._queue[0][0] if self._queue else None


def micros(seconds: float) -> int:
    """In whole microseconds."""
    return round(seconds * MICRO)
