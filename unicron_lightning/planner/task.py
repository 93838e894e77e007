"""The planner's view of a task."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unicron_lightning.planner.performance.model import PerformanceModel


@dataclass(frozen=True, kw_only=True)
class PlanTask:
    """A task t that competes for workers.

    Attributes:
        name: unique among the tasks planned together.
        performance: T(t,x), its achieved aggregate FLOP/s on x workers.
        transition_seconds: D_transition, the expected time lost by a change of its workers.
        weight: w(t), the value of a FLOP of this task.
        min_workers: fewest workers with which it may run.
        max_workers: most workers it may have, None for no limit.
        granularity: its number of workers is a multiple of this, e.g. TP x PP, or the workers of a node.
        may_pause: whether the planner may give it no workers in favour of others. Otherwise the task is paused only if
            the minimums of all such tasks do not fit together.
        caution: standard errors by which the plan takes T(t,x) to be less than predicted; see `cautious`.
        relayout_seconds: D_relayout, the further time lost if the change is to another TP x PP: a checkpoint, and the
            restart of all workers. 0: TP x PP is of no concern.

    Raises:
        ValueError: a value is out of range.
    """

    name: str
    performance: PerformanceModel
    transition_seconds: float
    weight: float = 1.0
    min_workers: int = 1
    max_workers: int | None = None
    granularity: int = 1
    may_pause: bool = True
    caution: float = 0.0
    relayout_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name='': expected the task's name")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError(f"task {self.name!r}: weight={self.weight!r}: expected a positive number")
        if not (math.isfinite(self.transition_seconds) and self.transition_seconds >= 0):
            given = f"transition_seconds={self.transition_seconds!r}"
            raise ValueError(f"task {self.name!r}: {given}: expected seconds, 0 or more")
        if not (math.isfinite(self.caution) and self.caution >= 0):
            raise ValueError(f"task {self.name!r}: caution={self.caution!r}: expected standard errors, 0 or more")
        if not (math.isfinite(self.relayout_seconds) and self.relayout_seconds >= 0):
            given = f"relayout_seconds={self.relayout_seconds!r}"
            raise ValueError(f"task {self.name!r}: {given}: expected seconds, 0 or more")
        if self.min_workers < 1 or self.granularity < 1:
            given = f"min_workers={self.min_workers!r}, granularity={self.granularity!r}"
            raise ValueError(f"task {self.name!r}: {given}: expected whole numbers of at least 1")
        if self.max_workers is not None and self.max_workers < self.min_workers:
            given = f"max_workers={self.max_workers!r}"
            raise ValueError(f"task {self.name!r}: {given}: expected at least min_workers={self.min_workers}")

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
        step = math.lcm(self.granularity, unit)
        first = -(-self.min_workers // step) * step
        last = num_workers if self.max_workers is None else min(self.max_workers, num_workers)
        return range(first, last + 1, step)
