"""D_running(n'): expected time until the next failure of a cluster of n' workers.

The paper's reward weighs a plan's WAF by this time ("Unicron", arXiv 2401.00134, the section on plan generation). Two
kinds of component fail here, each with a hazard of its own: a *worker* (its process, its accelerator) and a *node* with
all its workers. H(t) [failures] is the cumulative hazard of one component over the next t seconds and g the number of
workers on a node. Components fail independently of each other:

    S(t)          = exp(-( n' H_worker(t) + ceil(n'/g) H_node(t) ))          no failure within t
    D_running(n') = integral over t from 0 to infinity of S(t)  dt           [s]

With constant hazards, H(t) = lambda t, this is the paper's 1/n':

    D_running(n') = 1 / ( n' lambda_worker + ceil(n'/g) lambda_node )

Limits. The n' workers are assumed to be packed on ceil(n'/g) nodes. A failure of several nodes at once, as of a switch,
is one event and counts as one node failure. Constant hazards are estimated from observations, see below.

**Estimates of the rate while the cluster runs**: exponential lifetimes with a Gamma prior (`RateBelief`).

A component (a worker, or a node) fails at an unknown constant rate lambda [1/s], described by a Gamma distribution.
Observing d failures during an exposure of E component-seconds updates it (conjugate prior; e.g. Gelman et al., Bayesian
Data Analysis, 3rd ed., section 2.6):

    lambda ~ Gamma(a, b)    a [failures], b [component-seconds]        mean a / b
    lambda | d, E ~ Gamma(a + d, b + E)

so a prior reads as a failures observed earlier in b component-seconds. D_running uses the posterior mean of lambda. The
mean of 1 / lambda, the other candidate, is larger, and infinite for a <= 1; the chosen one is cautious and always
finite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Protocol

import numpy as np

from unicron_lightning.errors import check_numbers
from unicron_lightning.planner.arrays import FloatArray

SECONDS_PER_HOUR: Final = 3600.0
_RELATIVE_ERROR: Final = 1e-15
_TINY: Final = 1e-300

# The integral is taken over y = ln t by the trapezoidal rule: the integrand S(e^y) e^y is smooth and dies away at both
# ends, where that rule converges geometrically. In units of the shortest mean lifetime the range is from e^-75, below
# D_running of a million workers with a Weibull shape of 0.25, to e^20, where S has died away for a single one.
_LOG_TIME_LOW: Final = -75.0
_LOG_TIME_HIGH: Final = 20.0
_LOG_TIME_STEP: Final = 0.05


class Hazard(Protocol):
    """Probability of a component's failure as time passes from now on."""

    @property
    def mean_lifetime_seconds(self) -> float:
        """Mean time from new to failure."""
        ...

    def accumulated(self, times_seconds: FloatArray) -> FloatArray:
        """The cumulative hazard H(t) of one component that is alive now, over the next t seconds; same shape as t."""
        ...


@dataclass(frozen=True, kw_only=True)
class ConstantHazard:
    """Failures at a constant rate: lifetimes are exponential, age does not matter.

    Attributes:
        per_second: failures of one component per second of its running time, > 0.
    """

    per_second: float

    def __post_init__(self) -> None:
        check_numbers(self, "per_second", above=0, expected="failures per second, a finite number > 0")

    @property
    def mean_lifetime_seconds(self) -> float:
        return 1 / self.per_second

    def accumulated(self, times_seconds: FloatArray) -> FloatArray:
        return self.per_second * times_seconds


@dataclass(frozen=True, kw_only=True)
class FailureModel:
    """Hazards of the cluster's components. At least one of the two is given.

    Attributes:
        worker: hazard of a single worker; None if workers fail only with their node.
        node: hazard of a node; None if nodes are not counted separately.
        workers_per_node: number of workers lost with a node.
    """

    worker: Hazard | None = None
    node: Hazard | None = None
    workers_per_node: int = 1

    def __post_init__(self) -> None:
        if self.worker is None and self.node is None:
            raise ValueError("worker=None, node=None: expected the hazard of at least one of them")
        if self.workers_per_node < 1:
            raise ValueError(f"workers_per_node={self.workers_per_node}: expected an integer >= 1")

    def running_seconds(self, num_workers: int) -> float:
        """D_running(n'), in seconds; infinite for no workers.

        Args:
            num_workers: n', healthy workers of the cluster.
        """
        if num_workers < 0:
            raise ValueError(f"num_workers={num_workers}: expected an integer >= 0")
        if num_workers == 0:
            return math.inf
        num_nodes = -(-num_workers // self.workers_per_node)
        terms = [(num, hazard) for num, hazard in ((num_workers, self.worker), (num_nodes, self.node)) if hazard]
        if all(isinstance(hazard, ConstantHazard) for _, hazard in terms):
            return 1 / sum(num / hazard.mean_lifetime_seconds for num, hazard in terms)
        times, accumulated_worker, accumulated_node = self._table
        survival = np.exp(-(num_workers * accumulated_worker + num_nodes * accumulated_node))
        return float(_LOG_TIME_STEP * np.sum(survival * times))

    @cached_property
    def _table(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Times [s] on the logarithmic grid, and H_worker and H_node at these times: computed once for every n'."""
        lifetimes = [hazard.mean_lifetime_seconds for hazard in (self.worker, self.node) if hazard]
        grid = np.arange(_LOG_TIME_LOW, _LOG_TIME_HIGH, _LOG_TIME_STEP)
        times = min(lifetimes) * np.exp(grid)
        nothing = np.zeros_like(times)
        worker = self.worker.accumulated(times) if self.worker else nothing
        node = self.node.accumulated(times) if self.node else nothing
        return times, worker, node


_SHAPE_MIN: Final = 0.25
_SHAPE_MAX: Final = 8.0


@dataclass(frozen=True, kw_only=True)
class WeibullHazard:
    """The age-dependent hazard of a Weibull component.

    A component of age u fails with cumulative hazard (u / s)^k: shape k < 1 if new components fail most (burn-in),
    k > 1 if old ones do (wear), k = 1 for the constant hazard. A component is assumed to be as good as new after a
    failure (renewal), and ages to be in equilibrium, as in a population that has been renewed for long (Cox, Renewal
    Theory, 1962, chapter 5). Over the next t seconds

        H(t) = -ln( (1/mean) * integral from t to infinity of exp(-(u/s)^k) du ) = -ln Q(1/k, (t/s)^k)

    Attributes:
        shape: k, from `_SHAPE_MIN` to `_SHAPE_MAX`.
        scale_seconds: s, the age that a fraction 1/e outlives.
    """

    shape: float
    scale_seconds: float

    def __post_init__(self) -> None:
        if not _SHAPE_MIN <= self.shape <= _SHAPE_MAX:
            raise ValueError(f"shape={self.shape}: expected {_SHAPE_MIN} to {_SHAPE_MAX}")
        check_numbers(self, "scale_seconds", above=0)

    @property
    def mean_lifetime_seconds(self) -> float:
        return self.scale_seconds * math.gamma(1 + 1 / self.shape)

    def accumulated(self, times_seconds: FloatArray) -> FloatArray:
        scaled = np.power(times_seconds / self.scale_seconds, self.shape)
        fractions = [log_upper_fraction(1 / self.shape, float(x)) for x in scaled.flat]
        return -np.reshape(np.array(fractions, dtype=np.float64), scaled.shape)


def log_upper_fraction(shape: float, x: float) -> float:
    """The logarithm of the regularised upper incomplete gamma function, also where that underflows or is near 1.

        Q(a, x) = (1 / Gamma(a)) * integral from x to infinity of u^(a-1) exp(-u) du

    The power series and the continued fraction are textbook ones (NIST Digital Library of Mathematical Functions,
    sections 8.7 and 8.9, https://dlmf.nist.gov/8). scipy has this function but is no dependency of this package; the
    tests compare with it.

    Args:
        shape: a, > 0.
        x: >= 0.
    """
    if x <= 0:
        return 0.0
    if x < shape + 1:
        return math.log1p(-min(math.exp(_log_series(shape, x)), 1 - _RELATIVE_ERROR))
    return _log_continued_fraction(shape, x)


def _log_series(shape: float, x: float) -> float:
    """The logarithm of 1 - Q by its power series, which converges fast for x < shape + 1."""
    term = total = 1.0
    denominator = shape
    while term > total * _RELATIVE_ERROR:
        denominator += 1
        term *= x / denominator
        total += term
    return math.log(total) + shape * math.log(x) - x - math.lgamma(shape + 1)


def _log_continued_fraction(shape: float, x: float) -> float:
    """The logarithm of Q by its continued fraction (from the front, after Lentz), which converges fast for larger x."""
    b = x + 1 - shape
    c = 1 / _TINY
    d = 1 / b
    fraction = d
    change, n = 0.0, 0
    while abs(change - 1) > _RELATIVE_ERROR and n < 1_000_000:
        n += 1
        a = -n * (n - shape)
        b += 2
        d = a * d + b
        d = 1 / (d if abs(d) > _TINY else _TINY)
        c = b + a / c
        c = c if abs(c) > _TINY else _TINY
        change = c * d
        fraction *= change
    return math.log(fraction) + shape * math.log(x) - x - math.lgamma(shape)


@dataclass(frozen=True, kw_only=True)
class RateBelief:
    """Belief about a failure rate: Gamma(num_failures, exposure_seconds).

    Attributes:
        num_failures: a, > 0; need not be an integer.
        exposure_seconds: b, sum of all components' running times, > 0.
    """

    num_failures: float
    exposure_seconds: float

    def __post_init__(self) -> None:
        check_numbers(self, "num_failures", "exposure_seconds", above=0)

    @classmethod
    def from_mtbf(cls, mtbf_seconds: float, *, num_failures: float = 1.0) -> RateBelief:
        """A prior with this MTBF of one component, weighted as ``num_failures`` observed failures.

        With the default of one failure, a handful of observed ones outweighs the prior.
        """
        return cls(num_failures=num_failures, exposure_seconds=num_failures * mtbf_seconds)

    def observed(self, *, num_failures: int, exposure_seconds: float) -> RateBelief:
        """The belief after further observations.

        Args:
            num_failures: failures of any component since the last observation.
            exposure_seconds: running time since then, summed over all components, including those that did not fail.
        """
        if num_failures < 0:
            raise ValueError(f"num_failures={num_failures}: expected an integer >= 0")
        if not (math.isfinite(exposure_seconds) and exposure_seconds >= 0):
            raise ValueError(f"exposure_seconds={exposure_seconds}: expected a finite number >= 0")
        return RateBelief(
            num_failures=self.num_failures + num_failures, exposure_seconds=self.exposure_seconds + exposure_seconds
        )

    @property
    def mean_per_second(self) -> float:
        """Posterior mean of the rate, failures per component-second."""
        return self.num_failures / self.exposure_seconds

    def hazard(self) -> ConstantHazard:
        """The hazard to plan with: the posterior mean."""
        return ConstantHazard(per_second=self.mean_per_second)
