"""A prior for T(t,x), such as the analytic model, corrected by measurements.

The measured ratios r(x) = measured / prior are treated as samples of a smooth curve. Its logarithm is a Gaussian
process:

    log r ~ GP(0, k),   k(x, y) = e(x) e(y) (c + (1 - c) exp(-|log2(x/y)| / l))

e(x): the prior's relative error; c: the part of its error that is the same for all x (a wrong efficiency moves the
whole curve); l: number of doublings of x after which the remaining part is uncorrelated. The samples' errors are those
of the measured means. If the mean z of log r(x) / e(x) is beyond 2 or -2, the whole curve is wrong by more than the
prior declares, as one of another machine is, and the common part is c + z^2 - 4. The result equals the measurement at a
well measured x, the prior scaled by the common part far from all measurements, and the prior without any. Its error is
small where measured and never above the prior's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np

from unicron_lightning.errors import check_numbers
from unicron_lightning.planner.arrays import FloatArray
from unicron_lightning.planner.performance.model import ParallelConfiguration, PerformanceModel, check_num_workers

_COMMON: Final = 0.7
"""c, the part of the prior's error that all x share."""
_SURPRISE: Final = 2.0
"""Standard errors of the prior by which the measurements may differ from it without a doubt of its level."""
_DOUBLINGS: Final = 1.0
"""l, doublings of x after which the rest of the error is independent."""
_NOISE: Final = 0.05
"""Assumed relative standard deviation of a single measurement; it has the weight of one measurement in the estimate."""
_DRIFT: Final = 0.02
"""Relative standard deviation of the truth's movement within an hour."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Measurements of a running task with one number of workers.

    Attributes:
        flops_per_second: their mean, achieved aggregate FLOP/s: the model's FLOPs of a step / its duration.
        num_points: their number.
        deviation: relative standard deviation of a single one, as observed.
        at_seconds: time of the newest one, on any clock that the caller uses consistently.
        configuration: distribution of the task, if known.

    Raises:
        ValueError: a value is out of range.
    """

    flops_per_second: float
    num_points: float = 1.0
    deviation: float = 0.0
    at_seconds: float = 0.0
    configuration: ParallelConfiguration | None = None

    def __post_init__(self) -> None:
        check_numbers(self, "flops_per_second", above=0, expected="a finite number above 0")
        check_numbers(self, "num_points", least=1, expected="a finite number, 1 or more")
        check_numbers(self, "deviation", least=0)
        if not math.isfinite(self.at_seconds):
            raise ValueError(f"at_seconds={self.at_seconds!r}: expected a finite number")


@dataclass(frozen=True, kw_only=True)
class CalibratedModel:
    """A performance model from a prior and measurements.

    Attributes:
        prior: any model; where its throughput is 0, the task runs only at counts with measurements.
        measured: the measurements, by number of workers.
        prior_error: relative standard error of the prior; None takes the prior's own, which must be above 0 at some
            count for measurements to have any effect.

    Raises:
        ValueError: the error is out of range.
    """

    prior: PerformanceModel
    measured: Mapping[int, Measurement] = field(hash=False)
    prior_error: float | None = None

    def __post_init__(self) -> None:
        check_numbers(self, "prior_error", least=0, expected="a finite number, 0 or more, or None")

    def throughput(self, num_workers: int) -> float:
        check_num_workers(num_workers)
        guess = self.prior.throughput(num_workers)
        if guess == 0:
            return self.measured[num_workers].flops_per_second if num_workers in self.measured else 0.0
        return guess * math.exp(self._log_ratio(num_workers)[0])

    def configuration(self, num_workers: int) -> ParallelConfiguration | None:
        known = self.measured.get(num_workers)
        return (known.configuration if known else None) or self.prior.configuration(num_workers)

    def uncertainty(self, num_workers: int) -> float:
        check_num_workers(num_workers)
        if self.prior.throughput(num_workers) == 0 and num_workers in self.measured:
            return self._errors[num_workers]
        return self._log_ratio(num_workers)[1]

    def _error(self, num_workers: int) -> float:
        return self.prior.uncertainty(num_workers) if self.prior_error is None else self.prior_error

    @cached_property
    def _errors(self) -> dict[int, float]:
        """Relative standard error of each measured mean, as of the newest measurement."""
        known = self.measured.values()
        # The assumed noise counts as one further observation of a single measurement's scatter.
        scatter = _NOISE**2 + sum(each.num_points * each.deviation**2 for each in known)
        variation = scatter / (1 + sum(each.num_points - 1 for each in known))
        now = max((each.at_seconds for each in known), default=0.0)
        # A random walk moves by the square root of the time.
        return {
            count: math.sqrt(variation / each.num_points + _DRIFT**2 * (now - each.at_seconds) / 3600.0)
            for count, each in self.measured.items()
        }

    @cached_property
    def _samples(self) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray, float]:
        """log2 x, e(x), K^-1 log r and K^-1 of the measured counts where the prior is above 0; the common part."""
        rows = [
            (math.log2(count), self._error(count), math.log(mean / self.prior.throughput(count)), self._errors[count])
            for count, mean in sorted((count, each.flops_per_second) for count, each in self.measured.items())
            if self.prior.throughput(count) > 0 and math.isfinite(self._error(count))
        ]
        places, errors, ratios, noise = np.array(rows, dtype=np.float64).reshape(len(rows), 4).T
        level = float(np.mean(ratios / errors)) if rows and errors.all() else 0.0
        common = _COMMON + max(0.0, level**2 - _SURPRISE**2)
        covariance = _kernel(places, errors, places, errors, common) + np.diag(np.maximum(noise, 1e-9) ** 2)
        inverse: FloatArray = np.linalg.inv(covariance).astype(np.float64)
        return places, errors, inverse @ ratios, inverse, common

    def _log_ratio(self, num_workers: int) -> tuple[float, float]:
        """Mean and standard deviation of log r(x) after the measurements."""
        places, errors, solved, inverse, common = self._samples
        error = self._error(num_workers)
        if num_workers == 0 or not math.isfinite(error) or not len(places):
            return 0.0, error
        here = _kernel(np.array([math.log2(num_workers)]), np.array([error]), places, errors, common)[0]
        variance = error**2 * (common + 1 - _COMMON) - float(here @ inverse @ here)
        return float(here @ solved), min(math.sqrt(max(variance, 0.0)), error)


def _kernel(places: FloatArray, errors: FloatArray, others: FloatArray, their: FloatArray, common: float) -> FloatArray:
    distance = np.abs(places[:, None] - others[None, :]) / _DOUBLINGS
    shared: FloatArray = common + (1 - _COMMON) * np.exp(-distance)
    return errors[:, None] * their[None, :] * shared
