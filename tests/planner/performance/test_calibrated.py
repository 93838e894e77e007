from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unicron_lightning.planner.performance.calibrated import CalibratedModel
from unicron_lightning.planner.performance.model import PerformanceModel
from unicron_lightning.planner.performance.online import OnlineModel, OnlinePoint
from unicron_lightning.planner.performance.parsing import table_from_mapping

PRIOR = table_from_mapping({2**k: 1e14 * 2**k for k in range(3, 12)})


def online(*points: tuple[int, float], repeat: int = 50) -> OnlineModel:
    model = OnlineModel()
    for num_workers, flops_per_second in points:
        point = OnlinePoint(num_workers=num_workers, flops_per_second=flops_per_second, at_seconds=0.0)
        for _ in range(repeat):
            model = model.with_point(point)
    return model


def test_without_measurements_it_is_the_prior() -> None:
    model = CalibratedModel(prior=PRIOR, online=OnlineModel(), prior_error=0.1)
    assert isinstance(model, PerformanceModel)
    assert model.throughput(64) == PRIOR.throughput(64)
    assert model.uncertainty(64) == 0.1
    assert model.throughput(4) == 0


def test_where_measured_it_is_the_measurement() -> None:
    model = CalibratedModel(prior=PRIOR, online=online((64, 0.8 * PRIOR.throughput(64))), prior_error=0.2)
    assert model.throughput(64) == pytest.approx(0.8 * PRIOR.throughput(64), rel=2e-3)
    assert model.uncertainty(64) < 0.01


def test_elsewhere_the_common_part_of_the_ratio_is_taken_over() -> None:
    model = CalibratedModel(prior=PRIOR, online=online((64, 0.8 * PRIOR.throughput(64))), prior_error=0.2, common=0.7)
    ratios = [model.throughput(x) / PRIOR.throughput(x) for x in (64, 128, 512, 2048)]
    assert ratios == sorted(ratios)
    assert ratios[-1] == pytest.approx(0.8**0.7, rel=0.01)
    errors = [model.uncertainty(x) for x in (64, 128, 512, 2048)]
    assert errors == sorted(errors)
    assert errors[-1] == pytest.approx(0.2 * math.sqrt(1 - 0.7**2), rel=0.02)


@settings(deadline=None)
@given(st.dictionaries(st.integers(1, 4096), st.floats(0.3, 3.0), max_size=6), st.integers(0, 5000))
def test_the_error_is_at_most_the_priors(ratios, num_workers) -> None:
    points = [(x, ratio * 1e14 * x) for x, ratio in ratios.items()]
    model = CalibratedModel(prior=PRIOR, online=online(*points, repeat=2), prior_error=0.2)
    value = model.throughput(num_workers)
    assert math.isfinite(value) and value >= 0
    if PRIOR.throughput(num_workers) > 0:
        assert 0 <= model.uncertainty(num_workers) <= 0.2 + 1e-9


def test_the_error_is_the_one_that_is_made() -> None:
    # Truths drawn from the model's assumptions: the error divided by the claimed one has a standard deviation near 1.
    random = np.random.default_rng(5)
    counts = np.array([8, 16, 64, 256, 1024])
    places = np.log2(counts)
    kernel = 0.2**2 * (0.7 + 0.3 * np.exp(-np.abs(places[:, None] - places[None, :])))
    misses = []
    for _ in range(400):
        truth = np.exp(random.multivariate_normal(np.zeros(5), kernel))
        seen = [(int(x), PRIOR.throughput(int(x)) * r) for x, r in zip(counts[:2], truth[:2], strict=True)]
        model = CalibratedModel(prior=PRIOR, online=online(*seen, repeat=5), prior_error=0.2)
        for index in (2, 4):
            x = int(counts[index])
            misses.append(math.log(PRIOR.throughput(x) * truth[index] / model.throughput(x)) / model.uncertainty(x))
    assert np.std(misses) == pytest.approx(1, abs=0.12)


def test_a_task_that_ran_where_the_prior_says_it_cannot() -> None:
    model = CalibratedModel(prior=PRIOR, online=online((4, 3e14)), prior_error=0.1)
    assert model.throughput(4) == pytest.approx(3e14)
    assert model.uncertainty(4) < 0.05
    assert model.throughput(5) == 0
    assert model.throughput(8) == PRIOR.throughput(8)


def test_an_exact_prior_is_not_moved() -> None:
    model = CalibratedModel(prior=PRIOR, online=online((64, 1e15)))
    assert model.throughput(64) == PRIOR.throughput(64)


@pytest.mark.parametrize("wrong", [{"prior_error": -0.1}, {"common": 1.5}, {"doublings": 0.0}])
def test_wrong_settings_are_refused(wrong) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        CalibratedModel(prior=PRIOR, online=OnlineModel(), **wrong)
