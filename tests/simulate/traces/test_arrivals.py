"""Each process has its configured rate and its own shape; all statistics use fixed seeds."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from unicron_lightning.simulate.traces import HOUR, Arrivals, CauseConfig, SourceConfig, arrivals_of

CRASH = {"crash": CauseConfig(kind="exited_abnormally", count=1)}
SOURCE = SourceConfig(component="worker", mtbf_hours=100, causes=CRASH)


def draw(seconds: float, num: int = 200, seed: int = 0, **changes: object) -> Arrivals:
    return arrivals_of(dataclasses.replace(SOURCE, **changes), num, seconds, np.random.default_rng(seed))


@pytest.mark.parametrize(
    ("changes", "deviation"),
    [
        ({"process": "poisson"}, 1.0),
        ({"process": "poisson", "frequency": 3.0}, 1.0),
        ({"process": "weibull", "shape": 1.0}, 1.0),
        # Of a geometric number with mean m: var / mean of the sum is 2 m - 1.
        ({"process": "bursts", "burst_size": 4.0, "burst_seconds": 1.0}, math.sqrt(7)),
    ],
)
def test_the_number_of_failures_is_components_times_hours_over_mtbf(changes: dict, deviation: float) -> None:
    expected = 200 * 1000 / 100 * changes.get("frequency", 1.0)
    num = draw(1000 * HOUR, **changes).seconds.size
    assert abs(num - expected) < 4 * deviation * math.sqrt(expected)


def test_exact_gives_the_mean_whatever_the_seed() -> None:
    assert {draw(1000 * HOUR, seed=seed, process="exact").seconds.size for seed in range(5)} == {2000}


def test_poisson_times_are_exponential_apart_and_places_are_alike() -> None:
    drawn = draw(1000 * HOUR)
    gaps = np.diff(drawn.seconds)
    assert stats.kstest(gaps, stats.expon(scale=gaps.mean()).cdf).pvalue > 0.01
    assert stats.chisquare(np.bincount(drawn.components, minlength=200)).pvalue > 0.01


def test_weibull_lifetimes_have_the_shape_and_the_mean() -> None:
    # The first failure of each component: its lifetime from new.
    drawn = draw(3000 * HOUR, num=2000, process="weibull", shape=0.7)
    _, first = np.unique(drawn.components, return_index=True)
    lifetimes = drawn.seconds[first] / HOUR
    assert lifetimes.size > 1990
    assert lifetimes.mean() == pytest.approx(100, rel=0.08)
    scale = 100 / math.gamma(1 + 1 / 0.7)
    assert stats.kstest(lifetimes, stats.weibull_min(0.7, scale=scale).cdf).pvalue > 0.01


def test_young_components_fail_more_with_a_shape_below_one_and_less_above() -> None:
    def young(shape: float) -> float:
        times = draw(50 * HOUR, num=2000, process="weibull", shape=shape).seconds
        return float(np.mean(times < 10 * HOUR))

    assert young(0.7) > 0.25 > 0.2 > 0.15 > young(2.0)


def test_bursts_are_near_each_other() -> None:
    drawn = draw(1000 * HOUR, num=10_000, process="bursts", burst_size=5.0, burst_seconds=1.0, neighbours=3)
    # Far more failures follow within seconds than 10,000 components at this rate would have by chance (0.0278 per s).
    gaps = np.diff(drawn.seconds)
    assert np.mean(gaps < 0.5) > 2 * (1 - math.exp(-0.5 * 0.0278))
    scattered = draw(1000 * HOUR, num=50, mtbf_hours=5000, process="bursts", burst_size=5.0, burst_seconds=1.0)
    close = np.diff(scattered.seconds) < 60
    assert np.all(np.diff(scattered.components)[close] == 0)


@settings(max_examples=40, deadline=None)
@given(
    process=st.sampled_from(["poisson", "weibull", "bursts", "exact"]),
    shape=st.floats(0.4, 3),
    burst_size=st.floats(1, 6),
    num=st.integers(1, 60),
    hours=st.floats(0.1, 500),
    seed=st.integers(0, 2**32),
)
def test_any_source_gives_sorted_times_within_the_trace(
    process: str, shape: float, burst_size: float, num: int, hours: float, seed: int
) -> None:
    changes = {"process": process, "shape": shape, "burst_size": burst_size, "neighbours": 3}
    drawn = draw(hours * HOUR, num=num, seed=seed, **changes)
    assert np.all(np.diff(drawn.seconds) >= 0)
    assert np.all((drawn.seconds >= 0) & (drawn.seconds < hours * HOUR))
    assert np.all((drawn.components >= 0) & (drawn.components < num))
    again = draw(hours * HOUR, num=num, seed=seed, **changes)
    assert drawn.seconds.tobytes() == again.seconds.tobytes()
    assert drawn.components.tobytes() == again.components.tobytes()
