"""Rates estimated online: estimates converge, and the prior has its stated weight."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_lightning.planner.failures import FailureModel, RateBelief

HOUR = 3600.0
beliefs = st.builds(RateBelief, num_failures=st.floats(0.1, 100), exposure_seconds=st.floats(1e3, 1e10))
observations = st.lists(st.tuples(st.integers(0, 20), st.floats(0, 1e9)), max_size=6)


@given(beliefs, observations)
def test_the_order_of_observations_and_their_grouping_do_not_matter(
    prior: RateBelief, seen: list[tuple[int, float]]
) -> None:
    def after(items: list[tuple[int, float]]) -> RateBelief:
        belief = prior
        for num_failures, exposure in items:
            belief = belief.observed(num_failures=num_failures, exposure_seconds=exposure)
        return belief

    at_once = prior.observed(num_failures=sum(n for n, _ in seen), exposure_seconds=sum(e for _, e in seen))
    for belief in (after(seen), after(seen[::-1])):
        assert belief.mean_per_second == pytest.approx(at_once.mean_per_second)


def test_a_prior_of_one_failure_weighs_as_one_failure() -> None:
    prior = RateBelief.from_mtbf(1000 * HOUR)
    assert prior.mean_per_second == pytest.approx(1 / (1000 * HOUR))
    # one failure in 3000 h on top of one in 1000 h: two in 4000 h
    assert prior.observed(num_failures=1, exposure_seconds=3000 * HOUR).mean_per_second == pytest.approx(
        1 / (2000 * HOUR)
    )
    assert RateBelief.from_mtbf(1000 * HOUR, num_failures=9).observed(
        num_failures=1, exposure_seconds=11_000 * HOUR
    ).mean_per_second == pytest.approx(1 / (2000 * HOUR))


def test_estimates_converge() -> None:
    generator = np.random.default_rng(11)
    truth = 1 / (40_000 * HOUR)
    prior = RateBelief.from_mtbf(400_000 * HOUR)  # ten times too optimistic
    failures = int(generator.poisson(truth * 1e8 * HOUR))
    belief = prior.observed(num_failures=failures, exposure_seconds=1e8 * HOUR)
    assert belief.mean_per_second == pytest.approx(truth, rel=0.05)


@given(beliefs)
def test_the_mean_is_what_d_running_uses(belief: RateBelief) -> None:
    running = FailureModel(worker=belief.hazard()).running_seconds(16)
    assert running == pytest.approx(belief.exposure_seconds / belief.num_failures / 16)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda b: RateBelief(num_failures=0, exposure_seconds=1), "num_failures=0: expected"),
        (lambda b: RateBelief.from_mtbf(0.0), r"exposure_seconds=0\.0: expected"),
        (lambda b: b.observed(num_failures=-1, exposure_seconds=1), "num_failures=-1: expected"),
        (lambda b: b.observed(num_failures=1, exposure_seconds=float("nan")), "exposure_seconds=nan: expected"),
    ],
)
def test_wrong_values_are_refused_in_words(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call(RateBelief(num_failures=1, exposure_seconds=1))
