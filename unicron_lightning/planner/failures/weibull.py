"""Age-dependent failures: Weibull lifetimes.

A component of age u fails with cumulative hazard (u / s)^k: shape k < 1 if new components fail most (burn-in), k > 1 if
old ones do (wear), k = 1 for the constant hazard. A component is assumed to be as good as new after a failure
(renewal). Over the next t seconds, for components of ages a_i now,

    H(t) = mean over i of ( ((a_i + t)/s)^k - (a_i/s)^k )

which is exact for exactly these components, and an approximation for more or fewer of them, which are assumed to have
the same distribution of ages. Unknown ages are assumed to be in equilibrium, as in a population that has been renewed
for long (Cox, Renewal Theory, 1962, chapter 5):

    H(t) = -ln( (1/mean) * integral from t to infinity of exp(-(u/s)^k) du ) = -ln Q(1/k, (t/s)^k)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from unicron_lightning.planner.failures import incomplete_gamma
from unicron_lightning.planner.failures.model import FloatArray

SHAPE_MIN: Final = 0.25
SHAPE_MAX: Final = 8.0
_MAX_DISTINCT_AGES: Final = 512
_AS_NEW: Final = 1e-12
"""Ages below this fraction of the scale count as 0, so that the quotient of a time and an age cannot overflow."""


@dataclass(frozen=True, kw_only=True)
class WeibullHazard:
    """The hazard of a Weibull component.

    Attributes:
        shape: k, from `SHAPE_MIN` to `SHAPE_MAX`.
        scale_seconds: s, the age that a fraction 1/e outlives.
        ages_seconds: current ages of the running components; None for ages in equilibrium. More than 512 distinct ages
            are put into 512 groups of about equal number, each at its mean age.
    """

    shape: float
    scale_seconds: float
    ages_seconds: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not SHAPE_MIN <= self.shape <= SHAPE_MAX:
            raise ValueError(f"shape={self.shape}: expected {SHAPE_MIN} to {SHAPE_MAX}")
        if not (math.isfinite(self.scale_seconds) and self.scale_seconds > 0):
            raise ValueError(f"scale_seconds={self.scale_seconds}: expected a finite number > 0")
        if self.ages_seconds is not None:
            if not self.ages_seconds:
                raise ValueError("ages_seconds=(): expected at least one age, or None for ages in equilibrium")
            if not all(math.isfinite(age) and age >= 0 for age in self.ages_seconds):
                raise ValueError("ages_seconds: expected finite numbers >= 0")

    @property
    def mean_lifetime_seconds(self) -> float:
        return self.scale_seconds * math.gamma(1 + 1 / self.shape)

    def accumulated(self, times_seconds: FloatArray) -> FloatArray:
        if self.ages_seconds is None:
            scaled = np.power(times_seconds / self.scale_seconds, self.shape)
            fractions = [incomplete_gamma.log_upper_fraction(1 / self.shape, float(x)) for x in scaled.flat]
            return -np.reshape(np.array(fractions, dtype=np.float64), scaled.shape)
        total = np.zeros_like(times_seconds)
        for age, share in _grouped(self.ages_seconds):
            total += share * self._accumulated_from(age, times_seconds)
        return total

    def _accumulated_from(self, age: float, times: FloatArray) -> FloatArray:
        if age < _AS_NEW * self.scale_seconds:
            return np.power(times / self.scale_seconds, self.shape)
        # (a + t)^k - a^k without cancellation for t << a
        grown = np.expm1(self.shape * np.log1p(times / age))
        return np.asarray((age / self.scale_seconds) ** self.shape * grown, dtype=np.float64)


def _grouped(ages: Sequence[float]) -> list[tuple[float, float]]:
    """Distinct ages with the share of components that have each; see `WeibullHazard.ages_seconds`."""
    values, counts = np.unique(np.array(ages, dtype=np.float64), return_counts=True)
    if len(values) > _MAX_DISTINCT_AGES:
        parts = np.array_split(np.sort(np.array(ages, dtype=np.float64)), _MAX_DISTINCT_AGES)
        return [(float(part.mean()), len(part) / len(ages)) for part in parts]
    return [(float(value), int(count) / len(ages)) for value, count in zip(values, counts, strict=True)]
