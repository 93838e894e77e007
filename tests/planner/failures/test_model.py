"""D_running(n'): closed forms, limits, and invariants of every failure model."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_lightning.planner.failures import ConstantHazard, FailureModel, WeibullHazard

YEAR = 365.0 * 86400.0
rates = st.floats(1e-10, 1e-3)


@given(rates, st.integers(1, 1_000_000))
def test_a_constant_worker_hazard_gives_the_papers_one_over_n(rate: float, num_workers: int) -> None:
    model = FailureModel(worker=ConstantHazard(per_second=rate))
    assert model.running_seconds(num_workers) == pytest.approx(1 / (num_workers * rate))


@given(rates, rates, st.integers(1, 16), st.integers(1, 100_000))
def test_workers_and_nodes_fail_side_by_side(worker: float, node: float, per_node: int, num_workers: int) -> None:
    model = FailureModel(
        worker=ConstantHazard(per_second=worker), node=ConstantHazard(per_second=node), workers_per_node=per_node
    )
    expected = 1 / (num_workers * worker + math.ceil(num_workers / per_node) * node)
    assert model.running_seconds(num_workers) == pytest.approx(expected)


def test_units() -> None:
    by_mtbf = ConstantHazard(per_second=1 / (50_000 * 3600))
    # 1000 workers with an MTBF of 50,000 h each: 50 h
    assert FailureModel(worker=by_mtbf).running_seconds(1000) == pytest.approx(50 * 3600)


@given(rates, st.integers(1, 10_000))
def test_shape_1_is_the_constant_hazard(rate: float, num_workers: int) -> None:
    model = FailureModel(worker=WeibullHazard(shape=1.0, scale_seconds=1 / rate))
    assert model.running_seconds(num_workers) == pytest.approx(1 / (num_workers * rate), rel=1e-6)


@pytest.mark.parametrize("shape", [0.4, 0.7, 1.5, 3.0])
def test_in_equilibrium_one_component_has_the_mean_residual_life(shape: float) -> None:
    hazard = WeibullHazard(shape=shape, scale_seconds=YEAR)
    # E[T^2] / (2 E[T]), the mean residual life of a renewal process (inspection paradox)
    expected = YEAR * math.gamma(1 + 2 / shape) / (2 * math.gamma(1 + 1 / shape))
    assert FailureModel(worker=hazard).running_seconds(1) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("shape", [0.5, 0.7, 1.5, 3.0])
def test_in_equilibrium_many_components_are_a_poisson_process(shape: float) -> None:
    hazard = WeibullHazard(shape=shape, scale_seconds=YEAR)
    expected = hazard.mean_lifetime_seconds / 100_000
    assert FailureModel(worker=hazard).running_seconds(100_000) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("shape", [0.6, 2.5])
def test_the_integral_is_what_is_seen_in_simulation(shape: float) -> None:
    generator = np.random.default_rng(7)
    scale, num, draws = 2e7, 6, 4_000
    remaining = np.full((draws, num), 200 * scale)  # each component is renewed many times before it is observed
    while (running := remaining > 0).any():
        remaining = np.where(running, remaining - scale * generator.weibull(shape, remaining.shape), remaining)
    first = (-remaining).min(axis=1)
    model = FailureModel(worker=WeibullHazard(shape=shape, scale_seconds=scale))
    error = first.std() / math.sqrt(len(first))
    assert abs(model.running_seconds(num) - first.mean()) < 4 * error


@given(st.floats(0.3, 6.0), st.floats(1e3, 1e9), st.floats(1e-10, 1e-4), st.integers(1, 5000))
def test_more_workers_run_for_a_shorter_time(shape: float, scale: float, rate: float, num_workers: int) -> None:
    model = FailureModel(
        worker=WeibullHazard(shape=shape, scale_seconds=scale),
        node=ConstantHazard(per_second=rate),
        workers_per_node=8,
    )
    more, fewer = model.running_seconds(num_workers + 1), model.running_seconds(num_workers)
    assert 0 < more < fewer < 1.0000001 / rate
    assert FailureModel(node=model.node, workers_per_node=8).running_seconds(num_workers) > fewer


def test_no_worker_never_fails() -> None:
    assert FailureModel(worker=ConstantHazard(per_second=1.0)).running_seconds(0) == math.inf


def test_a_large_cluster_is_asked_quickly() -> None:
    model = FailureModel(worker=WeibullHazard(shape=0.7, scale_seconds=2e7))
    assert model.running_seconds(100_000) > 0
    start = time.process_time()
    for num_workers in range(99_000, 100_000):
        model.running_seconds(num_workers)
    assert time.process_time() - start < 1.0  # 30 microseconds each on the development machine


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ConstantHazard(per_second=0), "per_second=0: expected"),
        (lambda: ConstantHazard(per_second=math.inf), "per_second=inf: expected"),
        (lambda: FailureModel(), "expected the hazard of at least one"),
        (lambda: FailureModel(node=ConstantHazard(per_second=1), workers_per_node=0), "workers_per_node=0: expected"),
        (lambda: FailureModel(node=ConstantHazard(per_second=1)).running_seconds(-1), "num_workers=-1: expected"),
        (lambda: WeibullHazard(shape=0.1, scale_seconds=1), "shape=0.1: expected"),
        (lambda: WeibullHazard(shape=1, scale_seconds=0), "scale_seconds=0: expected"),
    ],
)
def test_wrong_values_are_refused_in_words(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()
