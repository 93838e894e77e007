"""The planner's view of a task."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from unicron_lightning.terms import Terms

if TYPE_CHECKING:
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
