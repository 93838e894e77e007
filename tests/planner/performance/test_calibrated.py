from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unicron_lightning.planner.performance.calibrated import CalibratedModel, Measurement
from unicron_lightning.planner.performance.model import (
    MeasuredPoint,
    MeasuredTable,
    ParallelConfiguration,
    PerformanceModel,
)

PRIOR = MeasuredTable(points=tuple(MeasuredPoint(num_workers=2**k, flops_per_second=1e14 * 2**k) for k in range(3, 12)))


def measured(*points: tuple[int, float], repeat: int = 50) -> dict[int, Measurement]:
    return {count: Measurement(flops_per_second=mean, num_points=repeat) for count, mean in points}


def test_without_measurements_it_is_the_prior() -> None:
    model = CalibratedModel(prior=PRIOR, measured={}, prior_error=0.1)
    assert isinstance(model, PerformanceModel)
    assert model.throughput(64) == PRIOR.throughput(64)
    assert model.uncertainty(64) == 0.1
    assert model.throughput(4) == 0


def test_where_measured_it_is_the_measurement() -> None:
    model = CalibratedModel(prior=PRIOR, measured=measured((64, 0.8 * PRIOR.throughput(64))), prior_error=0.2)
    assert model.throughput(64) == pytest.approx(0.8 * PRIOR.throughput(64), rel=2e-3)
    assert model.uncertainty(64) < 0.01


def test_elsewhere_the_common_part_of_the_ratio_is_taken_over() -> None:
    model = CalibratedModel(prior=PRIOR, measured=measured((64, 0.8 * PRIOR.throughput(64))), prior_error=0.2)
    ratios = [model.throughput(x) / PRIOR.throughput(x) for x in (64, 128, 512, 2048)]
    assert ratios == sorted(ratios)
    assert ratios[-1] == pytest.approx(0.8**0.7, rel=0.01)
    errors = [model.uncertainty(x) for x in (64, 128, 512, 2048)]
    assert errors == sorted(errors)
    assert errors[-1] == pytest.approx(0.2 * math.sqrt(1 - 0.7**2), rel=0.02)


@pytest.mark.parametrize("ratio", [1e-3, 0.1, 10.0, 1e3])
@pytest.mark.parametrize("sizes", [(64,), (16, 32, 64)])
def test_a_prior_of_another_machine_gives_the_shape_alone(ratio: float, sizes: tuple[int, ...]) -> None:
    """The part that all sizes share is not held back by an error that the prior does not declare."""
    points = [(x, ratio * PRIOR.throughput(x)) for x in sizes]
    model = CalibratedModel(prior=PRIOR, measured=measured(*points), prior_error=0.27)
    ratios = [model.throughput(x) / PRIOR.throughput(x) / ratio for x in (8, 64, 128, 512, 2048)]
    assert ratios == pytest.approx([1.0] * 5, rel=0.02)
    assert 0.1 < model.uncertainty(2048) <= 0.27


@settings(deadline=None)
@given(st.dictionaries(st.integers(1, 4096), st.floats(0.3, 3.0), max_size=6), st.integers(0, 5000))
def test_the_error_is_at_most_the_priors(ratios, num_workers) -> None:
    points = [(x, ratio * 1e14 * x) for x, ratio in ratios.items()]
    model = CalibratedModel(prior=PRIOR, measured=measured(*points, repeat=2), prior_error=0.2)
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
        model = CalibratedModel(prior=PRIOR, measured=measured(*seen, repeat=5), prior_error=0.2)
        for index in (2, 4):
            x = int(counts[index])
            misses.append(math.log(PRIOR.throughput(x) * truth[index] / model.throughput(x)) / model.uncertainty(x))
    assert np.std(misses) == pytest.approx(1, abs=0.12)


def test_a_task_that_ran_where_the_prior_says_it_cannot() -> None:
    model = CalibratedModel(prior=PRIOR, measured=measured((4, 3e14)), prior_error=0.1)
    assert model.throughput(4) == pytest.approx(3e14)
    assert model.uncertainty(4) < 0.05
    assert model.throughput(5) == 0
    assert model.throughput(8) == PRIOR.throughput(8)


def ran_at_4(**seen: Measurement | float) -> CalibratedModel:
    """The error of a size at which the prior is 0 is that of its measurements alone."""
    others = {count: each for count, each in ((16, seen.pop("at_16", None)),) if each is not None}
    known = {4: Measurement(**{"flops_per_second": 1e15, **seen}), **others}
    return CalibratedModel(prior=PRIOR, measured=known)


def test_more_measurements_are_surer_and_old_ones_less() -> None:
    assert ran_at_4().uncertainty(4) == pytest.approx(0.05)
    assert ran_at_4(num_points=100).uncertainty(4) < 0.001
    hours = [0.0, 1.0, 4.0, 100.0]
    newer = [Measurement(flops_per_second=1e15, num_points=1000, at_seconds=3600 * hour) for hour in hours]
    ages = [ran_at_4(num_points=1000, at_16=each).uncertainty(4) for each in newer]
    assert ages == sorted(ages)
    assert ages[1:3] == [pytest.approx(0.02, rel=0.01), pytest.approx(0.04, rel=0.01)]


def test_scatter_shows_in_the_error() -> None:
    assert ran_at_4(num_points=400, deviation=0.2).uncertainty(4) == pytest.approx(0.2 / math.sqrt(400), rel=0.01)
    elsewhere = Measurement(flops_per_second=1e15, num_points=400, deviation=0.2)
    assert ran_at_4(at_16=elsewhere).uncertainty(4) == pytest.approx(0.2, rel=0.01), "of all sizes together"


def test_the_configuration_is_the_measured_one_or_the_priors() -> None:
    layout = ParallelConfiguration(tensor_parallel=4, pipeline_parallel=1, data_parallel=2, micro_batch_size=1)
    model = CalibratedModel(prior=PRIOR, measured={8: Measurement(flops_per_second=1e15, configuration=layout)})
    assert (model.configuration(8), model.configuration(16)) == (layout, PRIOR.configuration(16))


@pytest.mark.parametrize(
    ("name", "value"),
    [("flops_per_second", 0.0), ("flops_per_second", math.nan), ("num_points", 0.0), ("deviation", -1.0)],
)
def test_wrong_measurements_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        Measurement(**{"flops_per_second": 1e15, name: value})


def test_an_exact_prior_is_not_moved() -> None:
    model = CalibratedModel(prior=PRIOR, measured=measured((64, 1e15)))
    assert model.throughput(64) == PRIOR.throughput(64)


def test_a_wrong_error_of_the_prior_is_refused() -> None:
    with pytest.raises(ValueError, match="prior_error"):
        CalibratedModel(prior=PRIOR, measured={}, prior_error=-0.1)
