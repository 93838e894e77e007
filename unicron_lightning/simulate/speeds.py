"""T(t,x) of simulated tasks by number of places, for the planner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unicron_lightning.simulate.workload import SimTask

if TYPE_CHECKING:
    from unicron_lightning.planner.performance.model import ParallelConfiguration
    from unicron_lightning.planner.task import PlanTask


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
        usable = num_workers * self._place_workers // self._task.quantum * self._task.quantum
        return self._task.performance.configuration(min(usable, self._task.max_workers or usable))

    def uncertainty(self, num_workers: int) -> float:
        """Return 0: the speeds of simulated tasks are exact."""
        return 0.0


def least_places(task: SimTask, place_workers: int) -> int:
    """Return the fewest places with which a task may run."""
    quanta = -(-task.min_workers // task.quantum)
    return max(1, -(-quanta * task.quantum // place_workers))


def most_places(task: SimTask, place_workers: int, num_places: int) -> int:
    """Return the most places whose workers a task can use, all or nearly all of them; at least the fewest."""
    most = num_places if task.max_workers is None else -(-task.max_workers // place_workers)
    return max(least_places(task, place_workers), min(most, num_places))


def plan_task(task: SimTask, place_workers: int, num_places: int) -> PlanTask:
    """Describe the task to the planner, alone and before it runs."""
    from unicron_lightning.planner.task import PlanTask

    return PlanTask(
        name=task.name,
        performance=PlaceSpeed(task, place_workers),
        transition_seconds=0.0,
        weight=task.weight,
        min_workers=least_places(task, place_workers),
        max_workers=most_places(task, place_workers, num_places),
    )
