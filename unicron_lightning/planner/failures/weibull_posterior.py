"""Shape and scale of a Weibull hazard, estimated from running and failed components, with a prior.

For a component observed from age v to age u that failed there (d = 1) or did not (d = 0), the likelihood is

    L(k, s) = ( (k/u) (u/s)^k )^d  exp( -(u/s)^k + (v/s)^k )

Prior: ln k is normal; given k, theta = (s0(k)/s)^k ~ Gamma(a0, a0), where s0(k) = m0 / Gamma(1 + 1/k) is the scale
whose mean lifetime is the expected m0. With k = 1 this is exactly `RateBelief.from_mtbf(m0, num_failures=a0)`. theta
is then integrated out in closed form, and the posterior of k is computed on a grid: with D failures, and U the sum of
(u/s0)^k - (v/s0)^k over all components,

    theta | k, data ~ Gamma(a0 + D, a0 + U)
    p(k | data)     ~ p(k) k^D prod_failed (u/s0)^k  Gamma(a0 + D) / (a0 + U)^(a0 + D)

`WeibullPosterior.hazard`, from which D_running is computed, is taken at the posterior mean of ln k and the mean of
theta there; it is not averaged over the posterior. Lifetimes of one component between renewals, and of different
components, are assumed to be independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from unicron_lightning.planner.failures import incomplete_gamma
from unicron_lightning.planner.failures.model import FloatArray
from unicron_lightning.planner.failures.weibull import SHAPE_MAX, SHAPE_MIN, WeibullHazard

_GRID_POINTS: Final = 121
_REFINEMENTS: Final = 2
_NEGLIGIBLE: Final = 1e-10


@dataclass(frozen=True, kw_only=True)
class Lifetime:
    """Observation of one component between two renewals.

    Attributes:
        age_seconds: its age at its failure, at its removal from service, or now.
        failed: whether it failed at that age; False if it was alive (right-censored).
        seen_from_age_seconds: its age when observation began (left-truncated): earlier failures would be unknown.
    """

    age_seconds: float
    failed: bool
    seen_from_age_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.seen_from_age_seconds <= self.age_seconds < math.inf:
            raise ValueError(
                f"seen_from_age_seconds={self.seen_from_age_seconds}, age_seconds={self.age_seconds}: "
                "expected 0 <= seen_from_age_seconds <= age_seconds, finite"
            )
        if self.failed and self.age_seconds == 0:
            raise ValueError("age_seconds=0, failed=True: expected an age > 0 at the failure")


@dataclass(frozen=True, kw_only=True)
class WeibullPrior:
    """Expectation before any observation.

    Attributes:
        mean_lifetime_seconds: m0, the expected MTBF of a component.
        num_failures: a0, the weight of that expectation in failures.
        shape: median of k; 1, no dependence on age, if nothing is known.
        log_shape_deviation: standard deviation of ln k; 0.5 holds 95 % of k within a factor 2.7 either way. Very small
            values fix the shape.
    """

    mean_lifetime_seconds: float
    num_failures: float = 1.0
    shape: float = 1.0
    log_shape_deviation: float = 0.5

    def __post_init__(self) -> None:
        for name in ("mean_lifetime_seconds", "num_failures", "log_shape_deviation"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}={value}: expected a finite number > 0")
        if not SHAPE_MIN <= self.shape <= SHAPE_MAX:
            raise ValueError(f"shape={self.shape}: expected {SHAPE_MIN} to {SHAPE_MAX}")


@dataclass(frozen=True, kw_only=True)
class ShapeGridPoint:
    """One shape k with its posterior probability, and the posterior of the scale given k.

    Attributes:
        shape: k.
        probability: posterior, of this grid point.
        num_failures: a of theta | k ~ Gamma(a, b).
        exposure: b, in units of s0(k)^k.
        unit_scale_seconds: s0(k).
    """

    shape: float
    probability: float
    num_failures: float
    exposure: float
    unit_scale_seconds: float

    def longer_than(self, mean_lifetime_seconds: float) -> float:
        """The probability, given k, that the mean lifetime exceeds a value."""
        theta = (self.unit_scale_seconds * math.gamma(1 + 1 / self.shape) / mean_lifetime_seconds) ** self.shape
        return incomplete_gamma.lower_fraction(self.num_failures, self.exposure * theta)


@dataclass(frozen=True, kw_only=True)
class WeibullPosterior:
    """Posterior of a Weibull hazard. Grid points of negligible probability are omitted.

    Attributes:
        grid: by rising shape; the probabilities add up to 1.
    """

    grid: tuple[ShapeGridPoint, ...]

    @property
    def shape(self) -> float:
        """The shape to plan with: exp of the posterior mean of ln k."""
        return math.exp(sum(point.probability * math.log(point.shape) for point in self.grid))

    def shape_interval(self, probability: float = 0.9) -> tuple[float, float]:
        """The equal-tailed credible interval of the shape, to the grid's resolution."""
        _check_probability(probability)
        sums = np.cumsum([point.probability for point in self.grid])
        tail = (1 - probability) / 2
        low, high = (int(np.searchsorted(sums, p)) for p in (tail, 1 - tail))
        return self.grid[low].shape, self.grid[min(high, len(self.grid) - 1)].shape

    def mean_lifetime_interval_seconds(self, probability: float = 0.9) -> tuple[float, float]:
        """The equal-tailed credible interval of the mean lifetime."""
        _check_probability(probability)
        tail = (1 - probability) / 2
        return self._mean_lifetime_quantile(tail), self._mean_lifetime_quantile(1 - tail)

    def hazard(self, ages_seconds: Sequence[float] | None = None) -> WeibullHazard:
        """The hazard to plan with, for components of these ages (None: in equilibrium)."""
        shape = self.shape
        shapes = [point.shape for point in self.grid]
        # Between grid points the posterior of theta is interpolated; it is smooth in k.
        logs = [math.log(p.unit_scale_seconds) - math.log(p.num_failures / p.exposure) / p.shape for p in self.grid]
        scale = math.exp(float(np.interp(shape, shapes, logs)))
        ages = None if ages_seconds is None else tuple(ages_seconds)
        return WeibullHazard(shape=shape, scale_seconds=scale, ages_seconds=ages)

    def _mean_lifetime_quantile(self, probability: float) -> float:
        low, high = -50.0, 80.0  # ln of seconds
        while high - low > 1e-9:
            middle = (low + high) / 2
            longer = sum(point.probability * point.longer_than(math.exp(middle)) for point in self.grid)
            low, high = (middle, high) if longer > 1 - probability else (low, middle)
        return math.exp((low + high) / 2)


def estimate_weibull(lifetimes: Sequence[Lifetime], prior: WeibullPrior) -> WeibullPosterior:
    """Estimate the posterior of shape and scale. Costs some 400 passes over the lifetimes: half a second for 50,000.

    Args:
        lifetimes: of all components, including running ones, which matter as much as failed ones.
        prior: see `WeibullPrior`.
    """
    ages = np.array([item.age_seconds for item in lifetimes], dtype=np.float64)
    starts = np.array([item.seen_from_age_seconds for item in lifetimes], dtype=np.float64)
    failed = np.array([item.failed for item in lifetimes], dtype=np.bool_)
    low, high = math.log(SHAPE_MIN), math.log(SHAPE_MAX)
    for refinement in range(_REFINEMENTS + 1):
        logs = np.linspace(low, high, _GRID_POINTS)
        points = [_weigh(math.exp(log), ages, starts, failed, prior) for log in logs]
        weights = np.exp(np.array([weight for weight, _ in points]) - max(weight for weight, _ in points))
        kept = np.flatnonzero(weights > _NEGLIGIBLE)
        if refinement < _REFINEMENTS:
            low, high = float(logs[max(kept[0] - 1, 0)]), float(logs[min(kept[-1] + 1, _GRID_POINTS - 1)])
    total = float(weights[kept].sum())
    return WeibullPosterior(
        grid=tuple(
            ShapeGridPoint(
                shape=math.exp(logs[i]),
                probability=float(weights[i]) / total,
                num_failures=prior.num_failures + int(failed.sum()),
                exposure=points[i][1],
                unit_scale_seconds=_unit_scale(math.exp(logs[i]), prior),
            )
            for i in kept
        )
    )


def _unit_scale(shape: float, prior: WeibullPrior) -> float:
    """s0(k): the scale whose mean lifetime is the prior's."""
    return prior.mean_lifetime_seconds / math.gamma(1 + 1 / shape)


def _weigh(
    shape: float, ages: FloatArray, starts: FloatArray, failed: np.ndarray, prior: WeibullPrior
) -> tuple[float, float]:
    """The logarithm of p(k | data) up to a constant, with respect to ln k; and a0 + U, the exposure at that shape."""
    unit = _unit_scale(shape, prior)
    exposure = prior.num_failures + float(np.sum((ages / unit) ** shape - (starts / unit) ** shape))
    num_failed = int(failed.sum())
    deviation = (math.log(shape) - math.log(prior.shape)) / prior.log_shape_deviation
    log_prior = -deviation * deviation / 2
    # prod (u/s0)^k, as a sum of logarithms
    log_likelihood = num_failed * math.log(shape) + shape * float(np.sum(np.log(ages[failed] / unit)))
    return log_prior + log_likelihood - (prior.num_failures + num_failed) * math.log(exposure), exposure


def _check_probability(probability: float) -> None:
    if not 0 < probability < 1:
        raise ValueError(f"probability={probability}: expected a number between 0 and 1, both excluded")
