"""The progress of the tasks without failures: the best allocation, changed instantly and at no cost."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unicron_lightning.simulate.result import MICRO
from unicron_lightning.simulate.speeds import PlaceSpeed, place_terms
from unicron_lightning.simulate.trace import SimCluster
from unicron_lightning.simulate.workload import SimTask


@dataclass(frozen=True, kw_only=True)
class StepFunction:
    """A step function of time: ``values[i]`` from ``moments[i]`` (microseconds) on, 0 before."""

    moments: Sequence[int]
    values: Sequence[float]

    def at(self, moment: int) -> float:
        """Return its value."""
        place = bisect.bisect_right(self.moments, moment) - 1
        return self.values[place] if place >= 0 else 0.0

    def between(self, start: int, end: int) -> float:
        """Return its integral [value x seconds]."""
        total, place = 0.0, max(0, bisect.bisect_right(self.moments, start) - 1)
        while place < len(self.moments) and self.moments[place] < end:
            until = self.moments[place + 1] if place + 1 < len(self.moments) else end
            span = min(until, end) - max(self.moments[place], start)
            total += self.values[place] * max(0, span) / MICRO
            place += 1
        return total


@dataclass(frozen=True, kw_only=True)
class Ideal:
    """The ideal progress of a cluster's tasks.

    Attributes:
        waf: weighted FLOP/s of each task.
        places: number of places of each task.
    """

    waf: Mapping[str, StepFunction]
    places: Mapping[str, StepFunction]

    @classmethod
    def of(cls, cluster: SimCluster, tasks: Sequence[SimTask], seconds: float) -> Ideal:
        """Compute the ideal of tasks that arrive and depart within a time; those with a number of steps end
        after them.
        """
        left = {task.name: task.steps for task in tasks}
        histories: dict[str, tuple[list[int], list[float], list[float]]] = {t.name: ([], [], []) for t in tasks}
        now, end = 0.0, seconds
        while now < end:
            present = [task for task in tasks if _is_present(task, now, left[task.name])]
            shares = optimum(present, cluster.num_places, cluster.place_workers)
            rates = {task.name: task.throughput(shares[task.name] * cluster.place_workers) for task in present}
            for task in tasks:
                moments, values, places = histories[task.name]
                moments.append(round(now * MICRO))
                values.append(task.terms.weight * rates.get(task.name, 0.0))
                places.append(float(shares.get(task.name, 0)))
            until = min([end, *_changes(tasks, now), *_ends(present, rates, left, now)])
            for task in present:
                steps = left[task.name]
                if steps is not None:
                    steps -= (until - now) * rates[task.name] / task.flops_per_step
                    left[task.name] = 0.0 if steps < 1e-6 else steps
            now = until
        return cls(
            waf={
                name: StepFunction(moments=moments, values=values) for name, (moments, values, _) in histories.items()
            },
            places={
                name: StepFunction(moments=moments, values=places) for name, (moments, _, places) in histories.items()
            },
        )

    def total(self, seconds: float) -> float:
        """Return the accumulated WAF of all tasks up to a time, weighted FLOP."""
        return sum(steps.between(0, round(seconds * MICRO)) for steps in self.waf.values())


def optimum(tasks: Sequence[SimTask], num_places: int, place_workers: int) -> dict[str, int]:
    """Return the places by task with the largest WAF, by the planner."""
    from unicron_lightning.planner.reward import Curve, PlanTask
    from unicron_lightning.planner.solver import solve
    from unicron_lightning.planner.state import ClusterState

    if not tasks:
        return {}
    alone = [
        PlanTask(
            name=task.name,
            performance=PlaceSpeed(task, place_workers),
            transition_seconds=0.0,
            terms=place_terms(task, place_workers, num_places),
        )
        for task in tasks
    ]
    curves = tuple(Curve.of(each, 1, num_places) for each in alone)
    plan = solve(ClusterState(tasks=curves, num_workers=num_places, running_seconds=1.0))
    return {task.name: plan.allocation[task.name] for task in tasks}


def _is_present(task: SimTask, now: float, left: float | None) -> bool:
    return task.arrival <= now and (task.departure is None or now < task.departure) and left != 0.0


def _changes(tasks: Sequence[SimTask], now: float) -> list[float]:
    moments = [moment for task in tasks for moment in (task.arrival, task.departure) if moment is not None]
    return [moment for moment in moments if moment > now]


def _ends(
    tasks: Sequence[SimTask], rates: Mapping[str, float], left: Mapping[str, float | None], now: float
) -> list[float]:
    ends = []
    for task in tasks:
        steps, rate = left[task.name], rates[task.name]
        if steps is not None and rate > 0:
            ends.append(now + steps * task.flops_per_step / rate)
    return ends
