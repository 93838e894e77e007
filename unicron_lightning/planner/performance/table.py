"""T(t,x) as the user measured it: a table of worker counts and throughputs.

Rules:

* At a measured count the table is taken as given.
* Between two counts, ``stair`` (the default) uses the smaller one's value: the task runs as measured and the other
  workers are idle. This is always possible, so nothing unmeasured is assumed. ``linear`` joins the points by straight
  lines, for a task that can use every count.
* Below the smallest count the task does not run: 0.
* Beyond the largest count, more workers add nothing, in either mode. ``beyond="extend"`` extends the line through the
  last two points instead; ``uncertainty`` is then inf, since nothing was measured there.

A table need not rise: a measured fall is kept. `unicron_lightning.planner.performance.parsing` reads tables from text.
"""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import dataclass
from typing import Literal

from unicron_lightning.planner.performance.model import ParallelConfiguration, check_num_workers

Between = Literal["stair", "linear"]
Beyond = Literal["hold", "extend"]


@dataclass(frozen=True, kw_only=True)
class MeasuredPoint:
    """One row of a table.

    Attributes:
        num_workers: number of the task's accelerators, at least 1.
        flops_per_second: achieved aggregate FLOP/s, at least 0.
        relative_error: relative standard error of ``flops_per_second``, 0.0 if exact.
        configuration: distribution of the task, if known.

    Raises:
        ValueError: a value is out of range, or the configuration needs more workers than ``num_workers``.
    """

    num_workers: int
    flops_per_second: float
    relative_error: float = 0.0
    configuration: ParallelConfiguration | None = None

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ValueError(f"num_workers={self.num_workers!r}: expected a whole number of at least 1")
        for name in ("flops_per_second", "relative_error"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}={value!r}: expected a finite number, 0 or more")
        if self.configuration is not None and self.configuration.num_workers > self.num_workers:
            needed = self.configuration.num_workers
            raise ValueError(f"configuration needs {needed} workers: expected at most num_workers={self.num_workers}")


@dataclass(frozen=True, kw_only=True)
class MeasuredTable:
    """A performance model from measured points. See the module for its rules.

    Attributes:
        points: at least one, rising in ``num_workers``, each count once.
        between: ``stair`` or ``linear``.
        beyond: ``hold`` or ``extend`` (which needs two points).

    Raises:
        ValueError: no points, not rising, or an unknown rule.
    """

    points: tuple[MeasuredPoint, ...]
    between: Between = "stair"
    beyond: Beyond = "hold"

    def __post_init__(self) -> None:
        counts = [point.num_workers for point in self.points]
        if not counts:
            raise ValueError("points=(): expected at least one measured point")
        for smaller, larger in itertools.pairwise(counts):
            if larger <= smaller:
                raise ValueError(f"num_workers {larger} after {smaller}: expected rising counts, each once")
        if self.between not in ("stair", "linear"):
            raise ValueError(f"between={self.between!r}: expected 'stair' or 'linear'")
        if self.beyond not in ("hold", "extend"):
            raise ValueError(f"beyond={self.beyond!r}: expected 'hold' or 'extend'")
        if self.beyond == "extend" and len(counts) < 2:
            raise ValueError("beyond='extend' with one point: expected at least two to draw a line through")

    def throughput(self, num_workers: int) -> float:
        left, right = self._around(num_workers)
        if left is None:
            return 0.0
        if right is None:
            if self.beyond == "hold" or num_workers == left.num_workers:
                return left.flops_per_second
            return max(0.0, _line(self.points[-2], left, num_workers))
        return left.flops_per_second if self.between == "stair" else _line(left, right, num_workers)

    def configuration(self, num_workers: int) -> ParallelConfiguration | None:
        left, right = self._around(num_workers)
        if left is None:
            return None
        idle_rest = self.between == "stair" if right is not None else self.beyond == "hold"
        return left.configuration if idle_rest or num_workers == left.num_workers else None

    def uncertainty(self, num_workers: int) -> float:
        left, right = self._around(num_workers)
        if left is None:
            return 0.0  # by the table, the task does not run there
        if right is None:
            known = self.beyond == "hold" or num_workers == left.num_workers
            return left.relative_error if known else math.inf
        if self.between == "stair" or num_workers == left.num_workers:
            return left.relative_error
        return max(left.relative_error, right.relative_error)

    def _around(self, num_workers: int) -> tuple[MeasuredPoint | None, MeasuredPoint | None]:
        """The last point with at most ``num_workers``, and the first with more."""
        check_num_workers(num_workers)
        index = bisect.bisect_right(self.points, num_workers, key=lambda point: point.num_workers)
        left = self.points[index - 1] if index else None
        return left, self.points[index] if index < len(self.points) else None


def _line(first: MeasuredPoint, second: MeasuredPoint, num_workers: int) -> float:
    """The straight line through two points, at ``num_workers``."""
    share = (num_workers - first.num_workers) / (second.num_workers - first.num_workers)
    return first.flops_per_second + share * (second.flops_per_second - first.flops_per_second)
