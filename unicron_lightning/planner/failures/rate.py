"""Estimates the failure rate while the cluster runs: exponential lifetimes with a Gamma prior.

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

from unicron_lightning.planner.failures.hazards import ConstantHazard


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
        for name in ("num_failures", "exposure_seconds"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}={value}: expected a finite number > 0")

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
