"""F(t,x), weighted achieved FLOP/s, and G(t,x'), the reward of a plan, in the notation of "Unicron", arXiv 2401.00134.

    F(t,x)  = w(t) * T(t,x)   if x satisfies the task's minimum, else 0                                       [FLOP/s]
    G(t,x') = F(t,x') * D_running(n')  -  [t is affected, or x' != x] * F(t,x) * D_transition                 [FLOP]
              -  [TP x PP of x' is not that of x] * F(t,x) * D_relayout

T is the achieved aggregate FLOP/s, D_running(n') the expected seconds to the next failure with n' workers, D_transition
the expected seconds of a change, x the task's workers before and x' those of the plan. F is a `Curve`;
`solver.reward_of` computes G.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from unicron_lightning.terms import Terms

if TYPE_CHECKING:
    from unicron_lightning.planner.arrays import FloatArray, IntArray
    from unicron_lightning.planner.performance.model import PerformanceModel


@dataclass(frozen=True, kw_only=True)
class PlanTask:
    """A task t that competes for workers.

    Attributes:
        name: unique among the tasks planned together.
        performance: T(t,x), its achieved aggregate FLOP/s on x workers.
        transition_seconds: D_transition, the expected time lost by a change of its workers.
        terms: the terms on which it competes.
        caution: standard errors by which the plan takes T(t,x) to be less than predicted; see `cautious`.
        relayout_seconds: D_relayout, the further time lost if the change is to another TP x PP: a checkpoint, and the
            restart of all workers. 0: TP x PP is of no concern.

    Raises:
        ValueError: a value is out of range.
    """

    name: str
    performance: PerformanceModel
    transition_seconds: float
    terms: Terms = field(default_factory=Terms)
    caution: float = 0.0
    relayout_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name='': expected the task's name")
        if (problem := self.terms.problem()) is not None:
            raise ValueError(f"task {self.name!r}: {problem}")
        for name in ("transition_seconds", "relayout_seconds", "caution"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                unit = "standard errors" if name == "caution" else "seconds"
                raise ValueError(f"task {self.name!r}: {name}={value!r}: expected {unit}, 0 or more")

    def cautious(self, num_workers: int) -> float:
        """Return T(t,x) exp(-z e(x)), with the model's relative standard error e(x) and `caution` z [FLOP/s].

        This is a lower quantile of T if its error is log-normal: z = 1 is exceeded with 84 %. An error above 1, or an
        unknown one, counts as 1, so that a task is never refused a size for want of measurements alone.
        """
        flops = self.performance.throughput(num_workers)
        if not self.caution or not flops > 0:
            return flops
        return flops * math.exp(-self.caution * min(self.performance.uncertainty(num_workers), 1.0))

    @property
    def longest_seconds(self) -> float:
        """The time lost by the longest change."""
        return self.transition_seconds + self.relayout_seconds

    def layout(self, num_workers: int) -> int:
        """Return a number for TP x PP with x workers, equal for equal ones; 0 if unknown or of no concern."""
        if not self.relayout_seconds or not num_workers:
            return 0
        found = self.performance.configuration(num_workers)
        return 0 if found is None else (found.tensor_parallel << 32) + found.pipeline_parallel

    def sizes(self, unit: int, num_workers: int) -> range:
        """The numbers of workers, other than 0, that a plan in units may give the task.

        Args:
            unit: workers per unit of the plan.
            num_workers: available workers.

        Returns:
            Multiples of both granularity and unit from the minimum to the maximum; may be empty.
        """
        terms = self.terms
        step = math.lcm(terms.granularity, unit)
        first = -(-terms.min_workers // step) * step
        last = num_workers if terms.max_workers is None else min(terms.max_workers, num_workers)
        return range(first, last + 1, step)


@dataclass(frozen=True, eq=False, kw_only=True)
class Curve:
    """F(t,x) of a task at every number of workers that a plan may give it, as known when the curve was made.

    Make it with `Curve.of`, and again when the performance model has learned more. Plans use curves so that a model
    that learns in the meantime cannot change half of a plan.

    Attributes:
        task: the task.
        unit: workers per unit of the plan.
        num_workers: largest number of workers that is covered.
        workers: int64, rising: the numbers of workers with which the task can run (where F > 0).
        waf: float64 [FLOP/s], F at each of them.
        layouts: int64, `PlanTask.layout` of each of them; empty if a change of TP x PP costs nothing.
    """

    task: PlanTask
    unit: int
    num_workers: int
    workers: IntArray = field(repr=False)
    waf: FloatArray = field(repr=False)
    layouts: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64), repr=False)
    _looked_up: dict[int, float] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, task: PlanTask, unit: int, num_workers: int) -> Curve:
        """Evaluate the performance model at every size that the task may have on up to ``num_workers`` workers.

        Raises:
            ValueError: a throughput is negative or not finite.
        """
        sizes = np.array(task.sizes(unit, num_workers), dtype=np.int64)
        flops = np.array([_flops(task, int(x)) for x in sizes], dtype=np.float64)
        runs = flops > 0
        known = sizes[runs] if task.relayout_seconds else sizes[:0]
        return cls(
            task=task,
            unit=unit,
            num_workers=num_workers,
            workers=sizes[runs],
            waf=task.terms.weight * flops[runs],
            layouts=np.array([task.layout(int(x)) for x in known], dtype=np.int64),
        )

    def of_task(self, task: PlanTask, num_workers: int) -> Curve:
        """Return the same curve for a task with the same performance, sizes and weight, and its greatest values."""
        curve = replace(self, task=task, num_workers=num_workers)
        curve.__dict__.update(waf_peak=self.waf_peak, waf_per_unit=self.waf_per_unit)
        return curve

    def is_relayout(self, before: int, after: int) -> bool:
        """Whether TP x PP with ``after`` workers is known not to be that with ``before``."""
        old, new = self.task.layout(before), self.task.layout(after)
        return bool(old and new and old != new)

    def waf_at(self, num_workers: int) -> float:
        """F(t,x) [FLOP/s] for any x, including sizes that no plan would give but that a task may have had before."""
        if num_workers < self.task.terms.min_workers:
            return 0.0
        if (known := self._looked_up.get(num_workers)) is not None:
            return known
        return self._looked_up.setdefault(num_workers, self._look_up(num_workers))

    def _look_up(self, num_workers: int) -> float:
        index = int(np.searchsorted(self.workers, num_workers))
        if index < len(self.workers) and self.workers[index] == num_workers:
            return float(self.waf[index])
        return self.task.terms.weight * _flops(self.task, num_workers)

    @cached_property
    def waf_peak(self) -> float:
        """The largest F [FLOP/s], 0 if the task cannot run at all."""
        return float(self.waf.max(initial=0.0))

    @cached_property
    def waf_per_unit(self) -> float:
        """The largest F per unit of workers [FLOP/s]."""
        return float((self.waf * self.unit / self.workers).max(initial=0.0))

    @cached_property
    def digest(self) -> bytes:
        """Digest of the contents: equal for curves that lead to the same plans."""
        # All of the task, but for its performance model, of which a plan knows these results only.
        values = [getattr(self.task, each.name) for each in fields(self.task) if each.name != "performance"]
        content = hashlib.blake2b(repr((values, self.unit, self.num_workers)).encode(), digest_size=16)
        content.update(self.workers.tobytes())
        content.update(self.waf.tobytes())
        content.update(self.layouts.tobytes())
        return content.digest()


def _flops(task: PlanTask, num_workers: int) -> float:
    """T(t,x) as the plan takes it, checked."""
    flops = task.cautious(num_workers)
    if not (math.isfinite(flops) and flops >= 0):
        given = f"throughput({num_workers}) is {float(flops)!r}"
        raise ValueError(f"task {task.name!r}: {given}: expected FLOP/s, finite, 0 or more")
    return flops
