"""Weibull hazards estimated from running and failed components: they converge, and their intervals cover."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, optimize, special

from unicron_lightning.planner.failures.model import FailureModel
from unicron_lightning.planner.failures.rate import RateBelief
from unicron_lightning.planner.failures.weibull_posterior import Lifetime, WeibullPrior, estimate_weibull

MONTH = 30 * 86400.0
PRIOR = WeibullPrior(mean_lifetime_seconds=10 * MONTH)


def watched(
    generator: np.random.Generator, shape: float, scale: float, num_components: int, window: float
) -> list[Lifetime]:
    """Components started at various times before the window, observed in it, and renewed when they fail."""
    seen = []
    for start in generator.uniform(0, 2 * scale, num_components):
        age, left = start, window
        life = scale * ((age / scale) ** shape + generator.exponential()) ** (1 / shape)
        while life - age < left:
            seen.append(Lifetime(age_seconds=life, failed=True, seen_from_age_seconds=age))
            left -= life - age
            age, life = 0.0, scale * generator.weibull(shape)
        seen.append(Lifetime(age_seconds=age + left, failed=False, seen_from_age_seconds=age))
    return seen


@pytest.mark.parametrize("shape", [0.6, 1.0, 2.0])
def test_estimates_converge_with_censored_and_truncated_lifetimes(shape: float) -> None:
    generator = np.random.default_rng(19)
    scale, intervals = 5 * MONTH, []
    for num_components in (20, 200, 4000):
        posterior = estimate_weibull(watched(generator, shape, scale, num_components, 2 * MONTH), PRIOR)
        intervals.append(posterior.shape_interval(0.9))
    hazard = posterior.hazard()
    assert hazard.shape == pytest.approx(shape, rel=0.06)
    assert hazard.mean_lifetime_seconds == pytest.approx(scale * math.gamma(1 + 1 / shape), rel=0.1)
    widths = [high / low for low, high in intervals]
    assert widths == sorted(widths, reverse=True)


def test_leaving_out_the_running_components_would_be_wrong() -> None:
    lifetimes = watched(np.random.default_rng(23), 1.0, 20 * MONTH, 500, 2 * MONTH)
    whole = estimate_weibull(lifetimes, PRIOR).hazard().mean_lifetime_seconds
    only_failed = estimate_weibull([item for item in lifetimes if item.failed], PRIOR).hazard().mean_lifetime_seconds
    assert whole == pytest.approx(20 * MONTH, rel=0.3)
    assert only_failed < whole / 4


def test_with_the_shape_fixed_at_1_it_is_the_gamma_posterior() -> None:
    lifetimes = watched(np.random.default_rng(29), 1.3, 4 * MONTH, 50, MONTH)
    prior = WeibullPrior(mean_lifetime_seconds=7 * MONTH, num_failures=2.5, log_shape_deviation=1e-6)
    posterior = estimate_weibull(lifetimes, prior)
    exposure = sum(item.age_seconds - item.seen_from_age_seconds for item in lifetimes)
    rate = RateBelief.from_mtbf(7 * MONTH, num_failures=2.5).observed(
        num_failures=sum(item.failed for item in lifetimes), exposure_seconds=exposure
    )
    assert posterior.shape == pytest.approx(1, rel=1e-5)
    assert posterior.hazard().mean_lifetime_seconds == pytest.approx(1 / rate.mean_per_second, rel=1e-4)
    low, high = posterior.mean_lifetime_interval_seconds(0.8)
    assert (1 / high, 1 / low) == pytest.approx(rate.interval_per_second(0.8), rel=1e-4)
    assert FailureModel(worker=posterior.hazard()).running_seconds(100) == pytest.approx(
        FailureModel(worker=rate.hazard()).running_seconds(100), rel=1e-4
    )


def test_the_posterior_of_the_shape_is_the_one_integrated_by_brute_force() -> None:
    lifetimes = watched(np.random.default_rng(31), 0.7, 3 * MONTH, 6, 2 * MONTH)
    prior = WeibullPrior(mean_lifetime_seconds=4 * MONTH, num_failures=1.5, shape=0.9, log_shape_deviation=0.4)

    def density(log_theta: float, log_shape: float) -> float:
        """Likelihood times prior, from the definitions, in months."""
        shape, theta = math.exp(log_shape), math.exp(log_theta)
        unit = 4 / math.gamma(1 + 1 / shape)
        scale = unit * theta ** (-1 / shape)
        value = -(((log_shape - math.log(0.9)) / 0.4) ** 2) / 2 + 1.5 * log_theta - 1.5 * theta
        for item in lifetimes:
            age, start = item.age_seconds / MONTH, item.seen_from_age_seconds / MONTH
            value -= (age / scale) ** shape - (start / scale) ** shape
            if item.failed:
                value += math.log(shape / age) + shape * math.log(age / scale)
        return math.exp(value)

    logs = np.linspace(math.log(0.25), math.log(2.5), 161)
    weights = np.array([integrate.quad(density, -8, 4, args=(log,), limit=200)[0] for log in logs])
    expected = math.exp(float(np.sum(weights * logs) / np.sum(weights)))
    assert estimate_weibull(lifetimes, prior).shape == pytest.approx(expected, rel=2e-3)


def test_intervals_cover_as_often_as_they_say() -> None:
    # the truth is drawn from the prior, so Bayesian intervals are exact for any data
    generator = np.random.default_rng(37)
    prior = WeibullPrior(mean_lifetime_seconds=4 * MONTH, num_failures=5, log_shape_deviation=0.3)
    covered_shape = covered_mean = 0
    trials = 150
    for _ in range(trials):
        shape = math.exp(generator.normal(0, 0.3))
        theta = generator.gamma(5, 1 / 5)
        mean = 4 * MONTH * theta ** (-1 / shape)
        lifetimes = watched(generator, shape, mean / math.gamma(1 + 1 / shape), 15, 2 * MONTH)
        posterior = estimate_weibull(lifetimes, prior)
        low, high = posterior.shape_interval(0.8)
        covered_shape += low <= shape <= high
        low, high = posterior.mean_lifetime_interval_seconds(0.8)
        covered_mean += low <= mean <= high
    deviation = 4 * math.sqrt(0.8 * 0.2 / trials)
    assert covered_shape / trials == pytest.approx(0.8, abs=deviation)
    assert covered_mean / trials == pytest.approx(0.8, abs=deviation)


def test_without_data_the_prior_is_what_is_known() -> None:
    posterior = estimate_weibull([], PRIOR)
    assert posterior.shape == pytest.approx(1, rel=0.01)  # the range of shapes has an asymmetric lower limit
    assert posterior.hazard().mean_lifetime_seconds == pytest.approx(10 * MONTH, rel=1e-3)
    low, high = posterior.mean_lifetime_interval_seconds(0.9)
    # Gamma(1, 1) at k = 1 would give m0/3.0 to m0/0.051; the unknown shape widens it
    assert low < 10 * MONTH / 3.0 < 10 * MONTH / 0.051 < high


def test_with_much_data_it_is_the_maximum_of_the_likelihood() -> None:
    lifetimes = watched(np.random.default_rng(41), 1.7, 3 * MONTH, 3000, 4 * MONTH)
    ages = np.array([item.age_seconds for item in lifetimes]) / MONTH
    starts = np.array([item.seen_from_age_seconds for item in lifetimes]) / MONTH
    failed = np.array([item.failed for item in lifetimes])

    def loss(parameters: np.ndarray) -> float:
        shape, scale = np.exp(parameters)
        log_hazard = np.log(shape / scale) + (shape - 1) * np.log(ages[failed] / scale)
        return float(np.sum((ages / scale) ** shape - (starts / scale) ** shape) - np.sum(log_hazard))

    shape, scale = np.exp(optimize.minimize(loss, np.zeros(2), method="Nelder-Mead").x)
    hazard = estimate_weibull(lifetimes, PRIOR).hazard()
    assert hazard.shape == pytest.approx(shape, rel=5e-3)
    assert hazard.scale_seconds / MONTH == pytest.approx(scale, rel=5e-3)


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.floats(0, 1e9), st.floats(1, 1e9), st.booleans()), max_size=8),
    st.floats(1e3, 1e9),
    st.floats(0.25, 8),
)
def test_whatever_was_seen_the_answer_is_a_distribution(
    seen: list[tuple[float, float, bool]], mean: float, shape: float
) -> None:
    lifetimes = [Lifetime(seen_from_age_seconds=s, age_seconds=s + u, failed=f) for s, u, f in seen]
    posterior = estimate_weibull(lifetimes, WeibullPrior(mean_lifetime_seconds=mean, shape=shape))
    assert sum(point.probability for point in posterior.grid) == pytest.approx(1)
    shapes = [point.shape for point in posterior.grid]
    assert shapes == sorted(shapes)
    low, high = posterior.shape_interval(0.5)
    assert shapes[0] <= low <= high <= shapes[-1]
    assert FailureModel(worker=posterior.hazard([0.0, 5.0])).running_seconds(3) > 0


def test_the_ages_now_are_kept() -> None:
    posterior = estimate_weibull([], WeibullPrior(mean_lifetime_seconds=MONTH, shape=2.0))
    young = FailureModel(worker=posterior.hazard([0.0])).running_seconds(50)
    old = FailureModel(worker=posterior.hazard([MONTH])).running_seconds(50)
    assert old < FailureModel(worker=posterior.hazard()).running_seconds(50) < young


def test_fifty_thousand_lifetimes_take_seconds() -> None:
    generator = np.random.default_rng(43)
    lifetimes = [Lifetime(age_seconds=float(a), failed=bool(a < MONTH)) for a in generator.exponential(MONTH, 50_000)]
    start = time.process_time()
    estimate_weibull(lifetimes, PRIOR)
    assert time.process_time() - start < 10  # half a second on the development machine


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Lifetime(age_seconds=-1.0, failed=False), "expected 0 <= seen_from_age_seconds <= age_seconds"),
        (lambda: Lifetime(age_seconds=1, failed=False, seen_from_age_seconds=2), "seen_from_age_seconds=2, age"),
        (lambda: Lifetime(age_seconds=math.inf, failed=False), "age_seconds=inf"),
        (lambda: Lifetime(age_seconds=0, failed=True), "expected an age > 0 at the failure"),
        (lambda: WeibullPrior(mean_lifetime_seconds=0), "mean_lifetime_seconds=0: expected"),
        (lambda: WeibullPrior(mean_lifetime_seconds=1, num_failures=-1), "num_failures=-1: expected"),
        (lambda: WeibullPrior(mean_lifetime_seconds=1, shape=9), "shape=9: expected 0.25 to 8.0"),
        (lambda: WeibullPrior(mean_lifetime_seconds=1, log_shape_deviation=0), "log_shape_deviation=0: expected"),
        (lambda: estimate_weibull([], PRIOR).shape_interval(0), "probability=0: expected"),
        (lambda: estimate_weibull([], PRIOR).mean_lifetime_interval_seconds(2), "probability=2: expected"),
    ],
)
def test_wrong_values_are_refused_in_words(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_the_mean_lifetime_is_the_weibulls() -> None:
    hazard = estimate_weibull([], WeibullPrior(mean_lifetime_seconds=MONTH, shape=0.5)).hazard()
    expected = hazard.scale_seconds * special.gamma(1 + 1 / hazard.shape)
    assert hazard.mean_lifetime_seconds == pytest.approx(expected)
