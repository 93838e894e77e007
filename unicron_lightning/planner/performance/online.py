"""T(t,x) from measurements of running tasks, with its standard error.

Every measurement is added to the statistics of its number of workers; its weight halves with each
``half_life_seconds``. The curve over the numbers of workers is made non-decreasing (`isotonic`): a task may always
leave workers idle, so a fall with more workers is noise or avoidable. Times are arguments: nothing here reads a clock.

Results where nothing was measured, with their errors:

| x | throughput | relative standard error |
|---|---|---|
| measured | the rising curve | of the mean, growing with age and with the shift by smoothing |
| between two measured counts | the straight line | as above, plus the range between both neighbours |
| above the largest | as at the largest: the others idle | growing: the truth may be anything up to proportional |
| below the smallest | proportional to x | inf: the task may not even fit in memory |
| nothing measured at all | 0 | inf |
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from unicron_lightning.planner.performance.model import ParallelConfiguration, check_num_workers


def isotonic(values: Sequence[float], weights: Sequence[float]) -> list[tuple[int, float]]:
    """The non-decreasing sequence with the least weighted sum of squared distances to ``values``.

    Args:
        values: in the order in which they should rise.
        weights: of each value, above 0.

    Returns:
        Blocks of equal fitted values, in order: the number of values in each, and their weighted mean.

    Raises:
        ValueError: lengths differ, or a weight is not above 0.
    """
    if len(values) != len(weights):
        raise ValueError(f"{len(values)} values with {len(weights)} weights: expected equal numbers")
    blocks: list[tuple[int, float, float]] = []
    for value, weight in zip(values, weights, strict=True):
        if not weight > 0:
            raise ValueError(f"weight={weight!r}: expected more than 0")
        count, mean, total = 1, float(value), float(weight)
        while blocks and blocks[-1][1] >= mean:
            before, its_mean, its_total = blocks.pop()
            mean = (its_mean * its_total + mean * total) / (its_total + total)
            count, total = count + before, total + its_total
        blocks.append((count, mean, total))
    return [(count, mean) for count, mean, _ in blocks]


_UNIFORM = 1 / math.sqrt(12)  # standard deviation of a uniform distribution over an interval of length 1


@dataclass(frozen=True, kw_only=True)
class OnlinePoint:
    """One measurement, over one or more optimizer steps.

    Attributes:
        num_workers: number of the task's accelerators.
        flops_per_second: achieved aggregate FLOP/s: the model's FLOPs of a step / its duration.
        at_seconds: time of the measurement, on any clock that the caller uses consistently.
        configuration: distribution of the task, if known.

    Raises:
        ValueError: a value is out of range.
    """

    num_workers: int
    flops_per_second: float
    at_seconds: float
    configuration: ParallelConfiguration | None = None

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ValueError(f"num_workers={self.num_workers!r}: expected a whole number of at least 1")
        if not (math.isfinite(self.flops_per_second) and self.flops_per_second > 0):
            raise ValueError(f"flops_per_second={self.flops_per_second!r}: expected a finite number above 0")
        if not math.isfinite(self.at_seconds):
            raise ValueError(f"at_seconds={self.at_seconds!r}: expected a finite number")


@dataclass(frozen=True, kw_only=True)
class CountStatistics:
    """Statistics of all measurements with one number of workers.

    Attributes:
        weight: sum of the weights w, as of ``at_seconds``; a new measurement has w = 1.
        weight_squared: sum of w^2.
        mean: weighted mean, FLOP/s.
        spread: sum of w (value - mean)^2.
        at_seconds: time of the newest measurement.
        configuration: configuration of the newest measurement.
    """

    weight: float
    weight_squared: float
    mean: float
    spread: float
    at_seconds: float
    configuration: ParallelConfiguration | None

    def with_point(self, point: OnlinePoint, half_life_seconds: float) -> CountStatistics:
        """The statistics with one more measurement.

        A point older than the newest has less weight and leaves the newest's time unchanged.
        """
        newest = max(self.at_seconds, point.at_seconds)
        kept = 0.5 ** ((newest - self.at_seconds) / half_life_seconds)
        added = 0.5 ** ((newest - point.at_seconds) / half_life_seconds)
        before = self.weight * kept
        weight = before + added
        step = point.flops_per_second - self.mean
        return CountStatistics(
            weight=weight,
            weight_squared=self.weight_squared * kept**2 + added**2,
            # These sums have no negative terms, so nothing cancels, however different weights and values are.
            mean=(before * self.mean + added * point.flops_per_second) / weight,
            spread=self.spread * kept + step**2 * (before * added / weight),
            at_seconds=newest,
            configuration=point.configuration if point.at_seconds >= self.at_seconds else self.configuration,
        )

    @property
    def effective_points(self) -> float:
        """Equivalent number of equally weighted measurements: (sum w)^2 / sum w^2."""
        return self.weight**2 / self.weight_squared


@dataclass(frozen=True, kw_only=True)
class OnlineModel:
    """A performance model that learns from measurements. Frozen: `with_point` and `at` return new ones.

    Attributes:
        now_seconds: time at which the model is evaluated.
        half_life_seconds: time after which a measurement has half its weight.
        noise: assumed relative standard deviation of a single measurement; it has the weight of one measurement in the
            estimate.
        drift: relative standard deviation of the truth's movement within a half-life.
        statistics: by number of workers.

    Raises:
        ValueError: a value is out of range.
    """

    now_seconds: float = 0.0
    half_life_seconds: float = 3600.0
    noise: float = 0.05
    drift: float = 0.02
    statistics: Mapping[int, CountStatistics] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not math.isfinite(self.now_seconds):
            raise ValueError(f"now_seconds={self.now_seconds!r}: expected a finite number")
        if not (math.isfinite(self.half_life_seconds) and self.half_life_seconds > 0):
            raise ValueError(f"half_life_seconds={self.half_life_seconds!r}: expected a finite number above 0")
        for name in ("noise", "drift"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}={value!r}: expected a finite number, 0 or more")

    def with_point(self, point: OnlinePoint) -> OnlineModel:
        """The model with one more measurement; its time is not before the measurement's."""
        before = self.statistics.get(point.num_workers)
        if before is None:
            after = CountStatistics(
                weight=1.0,
                weight_squared=1.0,
                mean=point.flops_per_second,
                spread=0.0,
                at_seconds=point.at_seconds,
                configuration=point.configuration,
            )
        else:
            after = before.with_point(point, self.half_life_seconds)
        now = max(self.now_seconds, point.at_seconds)
        return replace(self, now_seconds=now, statistics={**self.statistics, point.num_workers: after})

    def at(self, now_seconds: float) -> OnlineModel:
        """The model with the same measurements at another time."""
        return replace(self, now_seconds=now_seconds)

    def throughput(self, num_workers: int) -> float:
        left, right, share = self._around(num_workers)
        if left is None:
            return 0.0 if right is None else num_workers / right[0] * right[1]
        return left[1] if right is None else left[1] + share * (right[1] - left[1])

    def configuration(self, num_workers: int) -> ParallelConfiguration | None:
        check_num_workers(num_workers)
        known = self.statistics.get(num_workers)
        return None if known is None else known.configuration

    def uncertainty(self, num_workers: int) -> float:
        left, right, share = self._around(num_workers)
        if left is None:
            return math.inf
        if right is None:
            return math.hypot(left[2], _UNIFORM * (num_workers / left[0] - 1))
        if share == 0:
            return left[2]
        value = left[1] + share * (right[1] - left[1])
        measured = math.hypot((1 - share) * left[1] * left[2], share * right[1] * right[2])
        return math.hypot(measured, _UNIFORM * (right[1] - left[1])) / value

    @property
    def measured(self) -> tuple[tuple[int, float, float], ...]:
        """(number of workers, measured mean in FLOP/s without smoothing, its relative standard error), by rising
        number.
        """
        errors = self._errors
        return tuple((count, self.statistics[count].mean, errors[count]) for count in sorted(self.statistics))

    @cached_property
    def _variation(self) -> float:
        """Relative variance of one measurement, over all counts and the assumed `noise` as one observation."""
        seen = freedom = 0.0
        for known in self.statistics.values():
            points = known.effective_points
            seen += points * known.spread / known.weight / known.mean**2
            freedom += points - 1
        return (self.noise**2 + seen) / (1 + freedom)

    @cached_property
    def _errors(self) -> dict[int, float]:
        """Relative standard error of each mean, now."""
        errors = {}
        for count, known in self.statistics.items():
            age = max(0.0, self.now_seconds - known.at_seconds) / self.half_life_seconds
            # A random walk moves by the square root of the time.
            errors[count] = math.sqrt(self._variation / known.effective_points + self.drift**2 * age)
        return errors

    @cached_property
    def _curve(self) -> tuple[tuple[int, float, float], ...]:
        """Number of workers, smoothed FLOP/s, relative standard error; the first two never fall."""
        counts = sorted(self.statistics)
        means = [self.statistics[count].mean for count in counts]
        # An error of zero would be an infinite weight.
        errors = [max(self._errors[count], 1e-9) * mean for count, mean in zip(counts, means, strict=True)]
        weights = [1 / error**2 for error in errors]
        curve: list[tuple[int, float, float]] = []
        for size, value in isotonic(means, weights):
            block = slice(len(curve), len(curve) + size)
            error = math.sqrt(1 / sum(weights[block]))
            for count, mean in zip(counts[block], means[block], strict=True):
                curve.append((count, value, math.hypot(error, mean - value) / value))
        return tuple(curve)

    def _around(
        self, num_workers: int
    ) -> tuple[tuple[int, float, float] | None, tuple[int, float, float] | None, float]:
        """The last point of the curve with at most ``num_workers``, the first with more, and the way between them."""
        check_num_workers(num_workers)
        index = bisect.bisect_right(self._curve, num_workers, key=lambda point: point[0])
        left = self._curve[index - 1] if index else None
        right = self._curve[index] if index < len(self._curve) else None
        share = (num_workers - left[0]) / (right[0] - left[0]) if left and right else 0.0
        return left, right, share
