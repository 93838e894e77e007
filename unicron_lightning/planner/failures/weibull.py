"""Age-dependent failures: Weibull lifetimes.

A component of age u fails with cumulative hazard (u / s)^k: shape k < 1 if new components fail most (burn-in), k > 1 if
old ones do (wear), k = 1 for the constant hazard. A component is assumed to be as good as new after a failure
(renewal), and ages to be in equilibrium, as in a population that has been renewed for long (Cox, Renewal Theory, 1962,
chapter 5). Over the next t seconds

    H(t) = -ln( (1/mean) * integral from t to infinity of exp(-(u/s)^k) du ) = -ln Q(1/k, (t/s)^k)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from unicron_lightning.planner.failures import incomplete_gamma
from unicron_lightning.planner.failures.model import FloatArray

SHAPE_MIN: Final = 0.25
SHAPE_MAX: Final = 8.0


@dataclass(frozen=True, kw_only=True)
class WeibullHazard:
    """The hazard of a Weibull component.

    Attributes:
        shape: k, from `SHAPE_MIN` to `SHAPE_MAX`.
        scale_seconds: s, the age that a fraction 1/e outlives.
    """

    shape: float
    scale_seconds: float

    def __post_init__(self) -> None:
        if not SHAPE_MIN <= self.shape <= SHAPE_MAX:
            raise ValueError(f"shape={self.shape}: expected {SHAPE_MIN} to {SHAPE_MAX}")
        if not (math.isfinite(self.scale_seconds) and self.scale_seconds > 0):
            raise ValueError(f"scale_seconds={self.scale_seconds}: expected a finite number > 0")

    @property
    def mean_lifetime_seconds(self) -> float:
        return self.scale_seconds * math.gamma(1 + 1 / self.shape)

    def accumulated(self, times_seconds: FloatArray) -> FloatArray:
        scaled = np.power(times_seconds / self.scale_seconds, self.shape)
        fractions = [incomplete_gamma.log_upper_fraction(1 / self.shape, float(x)) for x in scaled.flat]
        return -np.reshape(np.array(fractions, dtype=np.float64), scaled.shape)
