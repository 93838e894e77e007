"""Times and components of one source's failures; kinds and causes are chosen later.

Each process has the same mean number of failures, components x seconds / mtbf:

* ``poisson``: N is Poisson distributed, times are uniform and independent, each component is as likely as any other;
* ``exact``: the same with N the mean, rounded; in both, a few components may be more likely than others (`offenders`);
* ``weibull``: lifetimes of each component from new, P(T > t) = exp(-(t / scale)^shape), with
  scale = mtbf / Gamma(1 + 1/shape). With a shape other than 1 the rate starts as that of
  new components and approaches 1 / mtbf with time;
* ``bursts``: a Neyman-Scott process. Bursts begin like ``poisson`` at rate 1 / (mtbf burst_size); each has a geometric
  number of failures, exponential times apart, among `neighbours` components in a row. Failures beyond the end are cut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unicron_lightning.simulate.traces.config import SourceConfig

HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """Failures of one source, sorted by time.

    Attributes:
        seconds: times, shape (n,).
        components: failing components, numbered from 0, shape (n,).
    """

    seconds: NDArray[np.float64]
    components: NDArray[np.int64]

    def sorted(self) -> Arrivals:
        """Sort by time, then by component."""
        order = np.lexsort((self.components, self.seconds))
        return Arrivals(seconds=self.seconds[order], components=self.components[order])


def arrivals_of(source: SourceConfig, num_components: int, seconds: float, random: np.random.Generator) -> Arrivals:
    """Draw the failures of a source.

    Args:
        source: its process and rate.
        num_components: number of components.
        seconds: duration of the trace.
        random: source of randomness.
    """
    mtbf = source.mtbf_hours * HOUR / source.frequency
    mean = num_components * seconds / mtbf
    if source.process == "weibull":
        return _renewals(source.shape, mtbf, num_components, seconds, random).sorted()
    if source.process == "bursts":
        return _bursts(source, mean, num_components, seconds, random).sorted()
    num = round(mean) if source.process == "exact" else int(random.poisson(mean))
    drawn = _uniform(num, num_components, seconds, random)
    if source.offenders:
        drawn = Arrivals(seconds=drawn.seconds, components=_offending(source, num, num_components, random))
    return drawn.sorted()


def _uniform(num: int, num_components: int, seconds: float, random: np.random.Generator) -> Arrivals:
    times = random.uniform(0.0, seconds, num)
    return Arrivals(seconds=times, components=random.integers(0, num_components, num))


def _offending(source: SourceConfig, num: int, num_components: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Draw components, of which a few are `offender_factor` times as likely as others."""
    shuffled = random.permutation(num_components)
    bad = shuffled[: math.ceil(source.offenders * num_components)]
    weights = np.ones(num_components)
    weights[bad] = source.offender_factor
    return random.choice(num_components, size=num, p=weights / weights.sum())


def _renewals(shape: float, mtbf: float, num_components: int, seconds: float, random: np.random.Generator) -> Arrivals:
    scale = mtbf / math.gamma(1 + 1 / shape)
    alive, ages = np.arange(num_components), np.zeros(num_components)
    times, components = [], []
    while alive.size:
        ages = ages + scale * random.weibull(shape, alive.size)
        within = ages < seconds
        alive, ages = alive[within], ages[within]
        times.append(ages)
        components.append(alive)
    return Arrivals(seconds=np.concatenate([*times, []]), components=np.concatenate([*components, []]).astype(np.int64))


def _bursts(
    source: SourceConfig, mean: float, num_components: int, seconds: float, random: np.random.Generator
) -> Arrivals:
    num_bursts = int(random.poisson(mean / source.burst_size))
    first = _uniform(num_bursts, num_components, seconds, random)
    sizes = random.geometric(1 / source.burst_size, num_bursts)
    starts = np.cumsum(sizes) - sizes
    gaps = random.exponential(source.burst_seconds, int(sizes.sum()))
    gaps[starts] = 0.0
    # Running sums within each burst: the overall sums, less the sum at the start of the burst.
    sums = np.cumsum(gaps)
    times = np.repeat(first.seconds, sizes) + sums - np.repeat(sums[starts], sizes)
    beside = random.integers(0, source.neighbours, times.size)
    beside[starts] = 0
    components = (np.repeat(first.components, sizes) + beside) % num_components
    within = times < seconds
    return Arrivals(seconds=times[within], components=components[within])
