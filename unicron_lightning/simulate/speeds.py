"""T(t,x) of simulated tasks by number of places, for the planner."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from unicron_lightning.simulate.workload import SimTask
from unicron_lightning.terms import Terms

if TYPE_CHECKING:
    from unicron_lightning.planner.performance.model import ParallelConfiguration


class PlaceSpeed:
    """A `PerformanceModel` by number of places, which caches each size.

    Args:
        task: the task.
        place_workers: workers of a place.
    """

    def __init__(self, task: SimTask, place_workers: int) -> None:
        self._task = task
        self._place_workers = place_workers
        self._known: dict[int, float] = {}

    def throughput(self, num_workers: int) -> float:
        """Return T with a number of places [FLOP/s]."""
        known = self._known.get(num_workers)
        if known is None:
            known = self._known[num_workers] = self._task.throughput(num_workers * self._place_workers)
        return known

    def configuration(self, num_workers: int) -> ParallelConfiguration | None:
        """Return the configuration with a number of places."""
        terms, workers = self._task.terms, num_workers * self._place_workers
        usable = workers - workers % terms.granularity
        return self._task.performance.configuration(min(usable, terms.max_workers or usable))

    def uncertainty(self, num_workers: int) -> float:
        """Return 0: the speeds of simulated tasks are exact."""
        return 0.0


def place_terms(task: SimTask, place_workers: int, num_places: int) -> Terms:
    """Return the terms of a task in places: up to the most places whose workers it can use, all or nearly all."""
    terms = task.terms
    least = -(-terms.min_workers // terms.granularity) * terms.granularity
    least_places = max(1, -(-least // place_workers))
    most_places = num_places if terms.max_workers is None else min(-(-terms.max_workers // place_workers), num_places)
    return replace(terms, min_workers=least_places, max_workers=max(least_places, most_places), granularity=1)
