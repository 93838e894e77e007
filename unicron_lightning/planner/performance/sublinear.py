"""T(t,x) of a task of which nothing is known but how its work is divided: a little less than proportional.

    T(t,x) = rate u(x)^exponent              rate: one worker's FLOP/s
    u(x)   = min(x, M / ceil(M / x))         M: parts that a step's work consists of, dealt out to the workers

Of M = 6 parts 4 workers need as many rounds as 3: u(4) = 3. So a task with a small M is not given workers that would
only wait for others; and equal tasks get equal shares, as the exponent is below 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from unicron_lightning.planner.performance.model import ParallelConfiguration, check_num_workers


@dataclass(frozen=True, kw_only=True)
class SublinearModel:
    """A performance model for want of a better one; what `CalibratedModel` can start from.

    Attributes:
        rate: FLOP/s of one worker, > 0.
        num_parts: M, None if the work can be divided at will; need not be whole (parts per worker of a group).
        exponent: 0 (more workers bring nothing) to 1 (each brings as much as the first).
        relative_error: what `uncertainty` says.

    Raises:
        ValueError: a value out of range.
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
