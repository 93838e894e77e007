from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression

from unicron_lightning.planner.performance.model import ParallelConfiguration, PerformanceModel
from unicron_lightning.planner.performance.online import OnlineModel, OnlinePoint, isotonic

POINTS = st.lists(
    st.builds(
        OnlinePoint,
        num_workers=st.integers(1, 64),
        flops_per_second=st.floats(1e12, 1e17),
        at_seconds=st.floats(0, 1e6),
    ),
    min_size=1,
    max_size=30,
)


def learn(model: OnlineModel, *points: tuple[int, float, float]) -> OnlineModel:
    for num_workers, flops_per_second, at_seconds in points:
        point = OnlinePoint(num_workers=num_workers, flops_per_second=flops_per_second, at_seconds=at_seconds)
        model = model.with_point(point)
    return model


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(1e-3, 1e3)), min_size=1))
def test_isotonic_is_scipys(pairs) -> None:
    values, weights = zip(*pairs, strict=True)
    fitted = [value for count, value in isotonic(values, weights) for _ in range(count)]
    np.testing.assert_allclose(fitted, isotonic_regression(values, weights=weights).x, rtol=1e-7, atol=1e-7)


def test_isotonic_refuses_what_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="weight=0"):
        isotonic([1.0], [0.0])
    with pytest.raises(ValueError, match="2 values with 1 weights"):
        isotonic([1.0, 2.0], [1.0])


def test_nothing_measured_is_nothing_known() -> None:
    model = OnlineModel()
    assert isinstance(model, PerformanceModel)
    assert model.throughput(8) == 0
    assert model.uncertainty(8) == math.inf
    assert model.configuration(8) is None


def test_the_four_regions() -> None:
    model = learn(OnlineModel(), (8, 1e15, 0), (16, 1.8e15, 0))
    assert model.throughput(8) == 1e15
    assert model.throughput(12) == pytest.approx(1.4e15)
    assert model.throughput(32) == 1.8e15
    assert model.throughput(4) == 0.5e15
    assert model.throughput(0) == 0
    assert model.uncertainty(4) == math.inf
    assert model.uncertainty(8) < model.uncertainty(12) < 0.25
    assert model.uncertainty(16) < model.uncertainty(24) < model.uncertainty(32)


@settings(deadline=None)
@given(POINTS, st.integers(0, 80))
def test_the_curve_never_falls(points, num_workers) -> None:
    model = OnlineModel()
    for point in points:
        model = model.with_point(point)
    value = model.throughput(num_workers)
    assert 0 <= value <= model.throughput(num_workers + 1) * (1 + 1e-9)
    assert value <= max(point.flops_per_second for point in points) * (1 + 1e-9)
    assert model.uncertainty(num_workers) > 0


@settings(deadline=None)
@given(POINTS, st.permutations(range(8)))
@example(
    [
        OnlinePoint(num_workers=1, flops_per_second=1e12, at_seconds=169365.0),
        OnlinePoint(num_workers=1, flops_per_second=2.527861503140109e16, at_seconds=0.0),
    ],
    [1, 0, 2, 3, 4, 5, 6, 7],
)
def test_the_order_of_arrival_does_not_matter(points, order) -> None:
    points = (points * 8)[:8]
    first, second = OnlineModel(), OnlineModel()
    for index in range(8):
        first, second = first.with_point(points[index]), second.with_point(points[order[index]])
    for count in first.statistics:
        assert first.throughput(count) == pytest.approx(second.throughput(count), rel=1e-6)
        assert first.uncertainty(count) == pytest.approx(second.uncertainty(count), rel=1e-5, abs=1e-9)


def test_the_newest_counts_most() -> None:
    model = learn(OnlineModel(half_life_seconds=100), (8, 1e15, 0), (8, 2e15, 100))
    assert model.throughput(8) == pytest.approx((0.5 * 1e15 + 2e15) / 1.5)
    late = learn(OnlineModel(half_life_seconds=100), (8, 1e15, 0), (8, 2e15, 10_000))
    assert late.throughput(8) == pytest.approx(2e15)


def test_an_old_measurement_is_less_than_one() -> None:
    model = learn(OnlineModel(half_life_seconds=100), (8, 1e15, 0), (8, 1e15, 100))
    assert model.statistics[8].effective_points == pytest.approx((1 + 0.5) ** 2 / (1 + 0.5**2))


def test_more_measurements_are_surer_and_old_ones_less() -> None:
    one = learn(OnlineModel(), (8, 1e15, 0))
    many = learn(OnlineModel(), *[(8, 1e15, 0)] * 100)
    assert one.uncertainty(8) == pytest.approx(0.05)
    assert many.uncertainty(8) < 0.001
    ages = [many.at(hours * 3600.0).uncertainty(8) for hours in (0, 1, 4, 100)]
    assert ages == sorted(ages)
    assert ages[1] == pytest.approx(0.02, rel=0.01)
    assert ages[2] == pytest.approx(0.04, rel=0.01)


def test_scatter_shows_in_the_error() -> None:
    random = np.random.default_rng(7)
    values = 1e15 * (1 + 0.2 * random.standard_normal(400))
    model = learn(OnlineModel(), *[(8, value, 0.0) for value in values])
    assert model.uncertainty(8) == pytest.approx(0.2 / math.sqrt(400), rel=0.15)


def test_the_error_is_the_one_that_is_made() -> None:
    # 300 times: 40 measurements of a known truth. The error divided by the claimed one has a standard deviation near 1.
    random = np.random.default_rng(3)
    misses = []
    for _ in range(300):
        model = OnlineModel(drift=0)
        for value in 1e15 * (1 + 0.1 * random.standard_normal(40)):
            model = learn(model, (8, value, 0.0))
        misses.append((model.throughput(8) / 1e15 - 1) / model.uncertainty(8))
    assert np.std(misses) == pytest.approx(1, abs=0.12)


def test_a_fall_is_smoothed_and_owned_up_to() -> None:
    model = learn(OnlineModel(), (8, 1.2e15, 0), (16, 1.0e15, 0))
    assert model.throughput(8) == model.throughput(16)
    assert 1.0e15 < model.throughput(8) < 1.2e15
    assert model.uncertainty(8) > 0.05


def test_the_configuration_is_the_newest() -> None:
    old = ParallelConfiguration(tensor_parallel=8, pipeline_parallel=1, data_parallel=1, micro_batch_size=1)
    new = ParallelConfiguration(tensor_parallel=4, pipeline_parallel=1, data_parallel=2, micro_batch_size=1)
    model = OnlineModel()
    for configuration, at_seconds in ((new, 10.0), (old, 5.0)):
        point = OnlinePoint(num_workers=8, flops_per_second=1e15, at_seconds=at_seconds, configuration=configuration)
        model = model.with_point(point)
    assert model.configuration(8) == new
    assert model.configuration(9) is None
    assert model.now_seconds == 10


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_workers": 0},
        {"flops_per_second": 0.0},
        {"flops_per_second": math.nan},
        {"at_seconds": math.inf},
    ],
)
def test_wrong_points_are_refused(wrong) -> None:
    fields = {"num_workers": 8, "flops_per_second": 1e15, "at_seconds": 0.0, **wrong}
    with pytest.raises(ValueError, match=next(iter(wrong))):
        OnlinePoint(**fields)


@pytest.mark.parametrize("wrong", [{"half_life_seconds": 0.0}, {"noise": -1.0}, {"drift": math.nan}])
def test_wrong_settings_are_refused(wrong) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        OnlineModel(**wrong)
