"""T(t,x) from what running tasks measure, newest first, with an honest error.

Every measurement is added to the statistics of its number of workers; older ones count less by half each
``half_life_seconds``. Between the numbers of workers the curve is made to rise (`isotonic`): a task may always leave
workers idle, so a fall with more workers is noise, or a task that ought to. Times are arguments: nothing here reads a
clock.

What is answered where nothing was measured, and how sure it is:

| x | throughput | relative standard error |
|---|---|---|
| measured | the rising curve | of the mean, growing with age, and with what the smoothing moved |
| between two measured counts | the straight line | that, and that the truth may be anywhere between both neighbours |
| above the largest | as at the largest: the others idle | growing: the truth may be anything up to proportional |
| below the smallest | proportional to x | inf: it may not even fit in memory |
| nothing measured at all | 0 | inf |
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from unicron_lightning.planner.performance.isotonic import isotonic
from unicron_lightning.planner.performance.model import ParallelConfiguration, check_num_workers

_UNIFORM = 1 / math.sqrt(12)  # standard deviation of what may be anywhere in an interval of length 1


@dataclass(frozen=True, kw_only=True)
class OnlinePoint:
    """One measurement, over one optimizer step or over several.

    Attributes:
        num_workers: accelerators the task had.
        flops_per_second: achieved aggregate FLOP/s: the model's FLOPs of a step / its duration.
        at_seconds: when, on any clock that the caller keeps to.
        configuration: how the task was spread, if that is known.

    Raises:
        ValueError: a value out of range.
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
    """What is kept of all measurements with one number of workers.

    Attributes:
        weight: sum of the weights w, as of ``at_seconds``; a new measurement has w = 1.
        weight_squared: sum of w^2.
        mean: weighted mean, FLOP/s.
        spread: sum of w (value - mean)^2.
        at_seconds: time of the newest.
        configuration: of the newest.
    """

    weight: float
    weight_squared: float
    mean: float
    spread: float
    at_seconds: float
    configuration: ParallelConfiguration | None

    def with_point(self, point: OnlinePoint, half_life_seconds: float) -> CountStatistics:
        """These and one more. A point older than the newest counts less, and keeps the newest's time."""
        newest = max(self.at_seconds, point.at_seconds)
        kept = 0.5 ** ((newest - self.at_seconds) / half_life_seconds)
        added = 0.5 ** ((newest - point.at_seconds) / half_life_seconds)
        before = self.weight * kept
        weight = before + added
        step = point.flops_per_second - self.mean
        return CountStatistics(
            weight=weight,
            weight_squared=self.weight_squared * kept**2 + added**2,
            # Sums of what is not negative: nothing cancels, however unlike weights and values are.
            mean=(before * self.mean + added * point.flops_per_second) / weight,
            spread=self.spread * kept + step**2 * (before * added / weight),
            at_seconds=newest,
            configuration=point.configuration if point.at_seconds >= self.at_seconds else self.configuration,
        )

    @property
    def effective_points(self) -> float:
        """How many equally weighted measurements are worth as much: (sum w)^2 / sum w^2."""
        return self.weight**2 / self.weight_squared


@dataclass(frozen=True, kw_only=True)
class OnlineModel:
    """A performance model that learns. Frozen: `with_point` and `at` give new ones.

    Attributes:
        now_seconds: when the questions are asked.
        half_life_seconds: after which a measurement counts half.
        noise: relative standard deviation of a single measurement that is assumed until enough are there; it counts
            as one measurement's worth of evidence.
        drift: relative standard deviation by which the truth may have moved within a half-life.
        statistics: by number of workers.

    Raises:
        ValueError: a value out of range.
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
        """This and one more measurement; now is not before it."""
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
        """The same knowledge, asked at another time."""
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
        """By rising number of workers: that, the mean measured (FLOP/s, not smoothed), its relative standard error."""
        errors = self._errors
        return tuple((count, self.statistics[count].mean, errors[count]) for count in sorted(self.statistics))

    @cached_property
    def _variation(self) -> float:
        """Relative variance of one measurement: as seen at all counts together, and the assumption's one."""
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
        # No error at all would be an infinite weight.
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
