"""The virtual clock: a queue of calls at times in whole microseconds.

Calls at the same moment are ordered: faults, then repairs, departures and arrivals, each in the trace's order; then
consequences of earlier calls, in the order in which they were scheduled. So a run is deterministic.
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
