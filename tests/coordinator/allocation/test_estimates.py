"""The planner's input about tasks: T(t,x) in one unit for all, transitions, failures."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unicron_lightning import wire
from unicron_lightning.coordinator.allocation.answers import (
    failure_model,
    flops_per_step,
    performance_of,
    performances,
    shape_of,
    transition_times,
)
from unicron_lightning.coordinator.config import PlannerConfig
from unicron_lightning.coordinator.incidents.facts import (
    Level,
    Lifetimes,
    Measured,
    MeasuredTransition,
    Speed,
    SpeedMeasurement,
)
from unicron_lightning.coordinator.lifecycle import Lifecycle
from unicron_lightning.coordinator.state import Task, Worker, decode_task, encode
from unicron_lightning.jobs import Job
from unicron_lightning.planner.performance.description import TransformerProfile
from unicron_lightning.planner.performance.transformer import TransformerModel

NOW = 5000.0


def speed(seconds: float, *, at: float = NOW, intervals: int = 16, workers: int = 1) -> Speed:
    return Speed(workers=workers, seconds=seconds, spread=0.01, intervals=intervals, at=at)


def task(name: str = "t", *, capacity: int = 0, **measured: object) -> Task:
    made = Task(id=name, min_nodes=1, max_nodes=8, created_at=0.0, lifecycle=Lifecycle(), measured=Measured(**measured))
    if capacity:
        made.workers["w"] = Worker(id="w", agent="a", local_rank=0, pid=1, capacity=capacity, founder=True)
    return made


def job(name: str = "t", **fields: object) -> Job:
    return Job(name=name, command=["train.py"], **fields)


def curve(model: object, most: int = 6) -> list[float]:
    return [model.throughput(x) for x in range(most + 1)]


def test_of_unknown_tasks_a_slot_more_is_worth_a_little_less_each_time():
    model = performance_of(task(), None)
    values = curve(model)
    gains = [after - before for before, after in itertools.pairwise(values)]
    assert values[:2] == [0.0, 1.0]
    assert gains == sorted(gains, reverse=True) and gains[-1] > 0.8


def test_workers_that_would_only_wait_for_others_are_worth_nothing():
    values = curve(performance_of(task(capacity=6), None), 8)
    assert values[4] == values[5] == pytest.approx(values[3])
    assert values[7] == values[6] > values[5]


def test_a_profile_is_taken_until_measurements_say_otherwise():
    profile = {1: 10.0, 2: 18.0, 4: 30.0}
    believed = performance_of(None, job(profile=profile, flops_per_step=6.0))
    assert curve(believed, 4) == [0.0, 10.0, 18.0, 24.0, 30.0]
    measured = performance_of(task(speeds={2: speed(0.5)}), job(profile=profile, flops_per_step=6.0))
    assert measured.throughput(2) == pytest.approx(12.0, rel=0.05)
    assert 20.0 < measured.throughput(4) < 25.0, "the whole profile was too high"


SHAPE = {"num_layers": 8, "hidden_size": 1024, "num_heads": 16, "sequence_length": 1024, "vocabulary_size": 32000}


def profile(**given: object) -> TransformerProfile:
    return TransformerProfile(**SHAPE, **{"global_batch_size": 16, "accelerator": "A100", **given})


@given(
    workers=st.integers(1, 4),
    most=st.integers(1, 6),
    batch=st.integers(1, 24),
    uneven=st.booleans(),
    idle=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_a_transformer_counts_slots_and_equals_the_search_without_a_limit(
    workers: int, most: int, batch: int, uneven: bool, idle: bool
) -> None:
    """The coordinator's search is limited to the workers that the job may have, which changes no size of the job."""
    shape = profile(global_batch_size=batch, uneven_shares=uneven, may_idle=idle)
    made = performance_of(None, job(transformer=shape, workers_per_node=workers, max_nodes=most))
    whole = TransformerModel.of(shape, ordered=True)
    for slots in range(most + 1):
        assert made.throughput(slots) == whole.throughput(slots * workers)
        assert made.configuration(slots) == whole.configuration(slots * workers)
        assert made.uncertainty(slots) == whole.uncertainty(slots * workers)


def test_measured_steps_and_a_profile_correct_a_transformer() -> None:
    shape = profile()
    model = performance_of(None, job(transformer=shape, max_nodes=8))
    flops = float(shape.flops_per_step)
    half = 2 * flops / model.throughput(4)
    measured = performance_of(task(speeds={4: speed(half)}), job(transformer=shape, max_nodes=8))
    assert measured.throughput(4) == pytest.approx(model.throughput(4) / 2, rel=0.02)
    assert measured.throughput(8) < 0.75 * model.throughput(8), "the whole model was too fast"
    stated = job(transformer=shape, max_nodes=8, profile={4: model.throughput(4) / 2}, submitted_at=NOW)
    assert performance_of(None, stated).throughput(4) == pytest.approx(model.throughput(4) / 2, rel=0.05)
    both = performance_of(task(speeds={4: speed(half / 3)}), stated)
    assert both.throughput(4) == pytest.approx(1.5 * model.throughput(4), rel=0.02), "steps are newer than the profile"


REPORTED = {**SHAPE, "num_kv_heads": 0, "tied_embeddings": False, "accelerator": "A100"}


def reporting(reported: dict[str, object] = REPORTED, **measured: object) -> Task:
    """A task whose workers report a shape and a spread of four micro-batches."""
    made = task(samples_per_step=16, **measured)
    made.layouts.transformer = reported
    layout = wire.Layout(tensor=1, pipeline=1)
    made.layouts.spread = wire.Spread(
        layout=layout, ordered=False, workers=4, micro_batches=4, tensor_divides={}, pipeline_divides={}
    )
    return decode_task(encode(made))


def test_the_shape_that_workers_report_is_the_prior_of_a_job_without_one() -> None:
    known = shape_of(reporting(), job(max_nodes=8))
    assert known == profile(tied_embeddings=False, micro_batch_size=4, uneven_shares=True)
    stated = job(max_nodes=8, transformer=known)
    assert curve(performance_of(reporting(), job(max_nodes=8)), 8) == curve(performance_of(None, stated), 8)
    assert shape_of(reporting(), job(transformer=profile())) == profile(), "the job's own comes first"
    attached = reporting(pace=SpeedMeasurement(level=Level(slots=2, workers=4)))
    two = performance_of(None, job(max_nodes=8, transformer=known, workers_per_node=2))
    assert curve(performance_of(attached, None), 4) == curve(two, 4)
    assert flops_per_step(attached, None) == known.flops_per_step


@pytest.mark.parametrize(
    "change", [{"accelerator": "B3"}, {"num_heads": 3}, {"num_layers": "many"}, {"hidden_size": 0}]
)
def test_a_reported_shape_that_makes_no_sense_is_ignored(change: dict[str, object]) -> None:
    odd = reporting({**REPORTED, **change})
    assert shape_of(odd, job()) is None and flops_per_step(odd, job()) is None
    assert performance_of(odd, job()).throughput(1) == 1.0


def test_of_a_shape_without_a_known_accelerator_only_the_flops_are_used() -> None:
    unknown = {name: value for name, value in REPORTED.items() if name != "accelerator"}
    assert flops_per_step(reporting(unknown), job()) == profile(tied_embeddings=False).flops_per_step
    assert performance_of(reporting(unknown), job()).throughput(1) == 1.0
    large = reporting({**REPORTED, "num_layers": 10**12})
    assert performance_of(large, job()).throughput(1) == 1.0, "its search would take too long"


def test_unknown_tasks_are_worth_per_slot_what_a_transformer_is_expected_to_achieve() -> None:
    models = performances({"unknown": task("unknown")}, {"known": job("known", transformer=profile())})
    assert models["unknown"].throughput(1) == pytest.approx(models["known"].throughput(1))


def test_flops_are_those_of_the_job_else_those_that_the_workers_tell():
    told = task(flops_per_step=8.0, speeds={2: speed(2.0)})
    assert performance_of(told, None).throughput(2) == pytest.approx(4.0, rel=0.05)
    assert performance_of(told, job(flops_per_step=2.0)).throughput(2) == pytest.approx(1.0, rel=0.05)
    assert flops_per_step(told, job(transformer=profile())) == profile().flops_per_step > 8.0


def test_unknown_tasks_are_worth_per_slot_what_the_others_achieve():
    known = task("known", flops_per_step=1e12, speeds={2: speed(1.0)})
    unknown = task("unknown", speeds={1: speed(30.0)})
    models = performances({"known": known, "unknown": unknown}, {"queued": job("queued")})
    assert models["unknown"].throughput(1) == pytest.approx(models["queued"].throughput(1)) == pytest.approx(5e11)
    assert models["known"].throughput(2) == pytest.approx(1e12, rel=0.05)


def test_the_shape_is_measured_even_if_the_flops_are_unknown():
    flat = task(speeds={1: speed(1.0), 2: speed(0.99), 4: speed(0.98)})
    model = performance_of(flat, None)
    assert model.throughput(1) == pytest.approx(1.0, rel=0.05)
    assert model.throughput(4) < 1.3


def test_measured_transitions_feed_the_planner():
    seen = [MeasuredTransition(kind="grow_in_place", seconds=4.0, at=float(at)) for at in range(20)]
    times = transition_times({"t": task(transitions=seen), "other": task("other")}, PlannerConfig())
    assert times.of_kind("t", "grow_in_place").median_seconds == pytest.approx(4.0, rel=0.3)
    assert times.of_kind("t", "restart").median_seconds == pytest.approx(15.0)
    assert times.of_kind("other", "grow_in_place").median_seconds > 1.5, "other tasks count too"


def test_failures_seen_shorten_the_time_to_the_next():
    calm = failure_model({}, Lifetimes(slot_seconds=1e7, worker_seconds=1e7), PlannerConfig())
    rough = failure_model(
        {"t": task(lifetimes=Lifetimes(slot_seconds=1e5, worker_seconds=1e5, slots_lost=3, workers_lost=7))},
        Lifetimes(),
        PlannerConfig(),
    )
    assert rough.running_seconds(6) < calm.running_seconds(6) / 5
    assert calm.running_seconds(1) > failure_model({}, Lifetimes(), PlannerConfig()).running_seconds(1)


def test_what_was_measured_is_kept_with_the_task():
    before = task(flops_per_step=2.0, speeds={3: speed(0.5)}, lifetimes=Lifetimes(workers_lost=2))
    assert decode_task(encode(before)) == before


def test_a_coordinator_that_plans_nothing_imports_no_planner():
    code = (
        "import sys; import unicron_lightning.coordinator.server.server\n"
        "import unicron_lightning.coordinator.allocation.answers\n"
        "heavy = {'numpy', 'numba', 'torch', 'unicron_lightning.planner.solver'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
