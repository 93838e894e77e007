"""T(t,x) of a task for which only the division of its work is known: slightly less than proportional.

    T(t,x) = rate u(x)^exponent              rate: one worker's FLOP/s
    u(x)   = min(x, M / ceil(M / x))         M: equal parts of a step's work, distributed over the workers

With M = 6 parts 4 workers need as many rounds as 3: u(4) = 3. A task with a small M thus gets no workers that would
only wait for others, and equal tasks get equal shares, as the exponent is below 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from unicron_lightning.planner.performance.model import ParallelConfiguration, check_num_workers


@dataclass(frozen=True, kw_only=True)
class SublinearModel:
    """A default performance model, also used as the prior of a `CalibratedModel`.

    Attributes:
        rate: FLOP/s of one worker, > 0.
        num_parts: M, None for arbitrarily divisible work; need not be an integer (parts per worker of a group).
        exponent: 0 (more workers add nothing) to 1 (each adds as much as the first).
        relative_error: result of `uncertainty`.

    Raises:
        ValueError: a value is out of range.
    """

    rate: float = 1.0
    num_parts: float | None = None
    exponent: float = 0.95
    relative_error: float = 0.3

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise ValueError(f"rate={self.rate!r}: expected FLOP/s, a finite number > 0")
        if self.num_parts is not None and not self.num_parts > 0:
            raise ValueError(f"num_parts={self.num_parts!r}: expected a number > 0, or None")
        if not 0 <= self.exponent <= 1:
            raise ValueError(f"exponent={self.exponent!r}: expected 0 to 1")
        if not (math.isfinite(self.relative_error) and self.relative_error >= 0):
            raise ValueError(f"relative_error={self.relative_error!r}: expected a finite number, 0 or more")

    def throughput(self, num_workers: int) -> float:
        check_num_workers(num_workers)
        return self.rate * self._useful(num_workers) ** self.exponent if num_workers else 0.0

    def configuration(self, num_workers: int) -> ParallelConfiguration | None:
        check_num_workers(num_workers)
        return None

    def uncertainty(self, num_workers: int) -> float:
        check_num_workers(num_workers)
        return self.relative_error if num_workers else 0.0

    def _useful(self, num_workers: int) -> float:
        if self.num_parts is None:
            return num_workers
        return min(num_workers, self.num_parts / math.ceil(self.num_parts / num_workers))
