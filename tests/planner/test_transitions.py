"""Durations of transitions: few are shrunk towards the prior, many are decisive, and outliers are harmless."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_lightning.planner.transitions import TransitionTime, TransitionTimes

SHRINK = "shrink_in_place"
PRIORS = {
    SHRINK: TransitionTime(median_seconds=2.0),
    "grow_in_place": TransitionTime(median_seconds=10.0),
    "restart": TransitionTime(median_seconds=60.0),
    "reconfigure_cold": TransitionTime(median_seconds=600.0),
}
durations = st.floats(1e-3, 1e6)


def measured(task: str, kind: str, *seconds: float) -> list[tuple[str, str, float]]:
    return [(task, kind, value) for value in seconds]


def logs(seconds: list[float]) -> list[float]:
    return sorted(map(math.log, seconds))


@pytest.mark.parametrize("kind", PRIORS)
def test_before_any_was_measured_the_prior_holds(kind: str) -> None:
    assert TransitionTimes([], PRIORS).of_kind("t", kind) == PRIORS[kind]


def test_the_mean_of_a_log_normal() -> None:
    time = TransitionTime(median_seconds=10.0, log_deviation=0.8)
    draws = np.random.default_rng(3).lognormal(math.log(10), 0.8, 400_000)
    assert time.expected_seconds == pytest.approx(draws.mean(), rel=0.01)


@pytest.mark.parametrize(("num", "tolerance"), [(40, 0.35), (4000, 0.06)])
def test_many_measurements_stand_for_themselves(num: int, tolerance: float) -> None:
    draws = np.random.default_rng(5).lognormal(math.log(30), 0.4, num)  # the prior's value is 2 s
    time = TransitionTimes(measured("t", SHRINK, *draws), PRIORS, newest=num).of_kind("t", SHRINK)
    assert time.expected_seconds == pytest.approx(30 * math.exp(0.08), rel=tolerance)


def test_a_quarter_of_outliers_moves_little() -> None:
    generator = np.random.default_rng(7)
    draws = generator.lognormal(math.log(30), 0.3, 60)
    spoiled = draws.copy()
    spoiled[::4] = 3600.0
    clean, dirty = (
        TransitionTimes(measured("t", SHRINK, *values), PRIORS).of_kind("t", SHRINK).expected_seconds
        for values in (draws, spoiled)
    )
    assert clean < dirty < 1.4 * clean
    assert spoiled.mean() > 20 * clean


@given(st.lists(durations, min_size=1, max_size=9), st.floats(0.5, 50))
def test_the_median_lies_between_the_prior_and_what_was_measured(seconds: list[float], weight: float) -> None:
    prior = TransitionTime(median_seconds=7.0, num_transitions=weight)
    after = prior.observed(logs(seconds)).median_seconds
    middle = math.exp(statistics.median(map(math.log, seconds)))
    assert min(7.0, middle) * 0.999999 <= after <= max(7.0, middle) * 1.000001
    firmer = TransitionTime(median_seconds=7.0, num_transitions=2 * weight).observed(logs(seconds)).median_seconds
    assert abs(math.log(firmer / 7.0)) <= abs(math.log(after / 7.0)) + 1e-9


@given(st.lists(durations, min_size=1, max_size=9), st.floats(1e-2, 1e2))
def test_units_do_not_matter(seconds: list[float], factor: float) -> None:
    one = TransitionTime(median_seconds=7.0).observed(logs(seconds))
    other = TransitionTime(median_seconds=7.0 * factor).observed(logs([value * factor for value in seconds]))
    assert other.median_seconds == pytest.approx(one.median_seconds * factor, rel=1e-6)
    assert other.log_deviation == pytest.approx(one.log_deviation, abs=1e-6)


def test_one_measurement_does_not_claim_to_know_the_spread() -> None:
    assert TransitionTime(median_seconds=5.0, log_deviation=0.6).observed(logs([9.0])).log_deviation == pytest.approx(
        0.6
    )


def test_a_task_without_measurements_learns_from_the_others() -> None:
    times = TransitionTimes(measured("a", SHRINK, *[40.0] * 50), PRIORS)
    assert times.of_kind("b", SHRINK).median_seconds == pytest.approx(40, rel=0.2)
    assert times.of_kind("b", SHRINK).num_transitions == PRIORS[SHRINK].num_transitions
    # one duration of its own has an effect among the fifty
    own = TransitionTimes([*measured("a", SHRINK, *[40.0] * 50), *measured("b", SHRINK, 4.0)], PRIORS)
    assert own.of_kind("b", SHRINK).median_seconds < 0.7 * times.of_kind("b", SHRINK).median_seconds


def test_a_kind_says_nothing_of_another() -> None:
    times = TransitionTimes(measured("a", SHRINK, *[40.0] * 50), PRIORS)
    assert times.of_kind("a", "restart") == PRIORS["restart"]


def test_only_the_newest_count() -> None:
    times = TransitionTimes(measured("t", SHRINK, *[500.0] * 50, *[3.0] * 8), PRIORS, newest=8)
    assert times.of_kind("t", SHRINK) == TransitionTimes(measured("t", SHRINK, *[3.0] * 8), PRIORS).of_kind("t", SHRINK)


def test_one_number_for_a_task_follows_what_happens_to_it() -> None:
    even = TransitionTimes([], PRIORS).expected_seconds("t")
    assert even == pytest.approx(sum(p.expected_seconds for p in PRIORS.values()) / 4)
    mostly_shrinks = TransitionTimes(measured("t", SHRINK, *[2.0] * 60), PRIORS).expected_seconds("t")
    assert mostly_shrinks < 0.3 * even


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TransitionTime(median_seconds=-1), "median_seconds=-1: expected"),
        (lambda: TransitionTime(median_seconds=1, log_deviation=-1), "log_deviation=-1: expected"),
        (lambda: TransitionTime(median_seconds=1, num_transitions=0), "num_transitions=0: expected"),
        (lambda: TransitionTimes([], PRIORS, newest=0), "newest=0: expected"),
    ],
)
def test_wrong_values_are_refused_in_words(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()
