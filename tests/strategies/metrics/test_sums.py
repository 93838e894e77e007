"""Sums beside gradients: loss, logged values, unused parameters, norm statistics, metric states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torchmetrics
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from worker.simulation import Coordinator, LateFault, run_threads

from unicron_lightning.data.loader import GlobalBatch
from unicron_lightning.strategies.collectives.default_group import never
from unicron_lightning.strategies.metrics.recording import RecordingResults
from unicron_lightning.strategies.metrics.sums import StepMetrics, merge_metric_states, set_common_aside
from unicron_lightning.worker import codec
from unicron_lightning.worker.buckets import GradientBuckets
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.module_buffers import ModuleBuffers
from unicron_lightning.worker.operations import Agreement
from unicron_lightning.worker.step import GradientStep
from unicron_lightning.worker.sums import LogCall, NormStatistics, Options, StepSums, SumsLayout, merge_calls


def options(name: str, reduce: str = "mean") -> Options:
    return ("training_step", name, False, True, True, True, reduce, True)


def call(name: str, value: float, weight: float = 1.0, reduce: str = "mean") -> LogCall:
    return LogCall(options=options(name, reduce), value=torch.tensor(value, dtype=torch.float64), weight=weight)


parts = st.lists(
    st.lists(st.tuples(st.sampled_from(["a", "b"]), st.floats(-100, 100), st.integers(1, 9)), max_size=4), max_size=4
)


@given(parts, st.sampled_from(["mean", "sum", "min", "max"]))
def test_merging_in_parts_or_at_once_is_the_same(ranks: list[list[tuple[str, float, int]]], reduce: str) -> None:
    """Holds for any distribution of the micro-batches over the ranks."""
    calls = [[call(name, value, weight, reduce) for name, value, weight in rank] for rank in ranks]
    once = {c.options: c for c in merge_calls([c for rank in calls for c in rank])}
    twice = {c.options: c for c in merge_calls([c for rank in calls for c in merge_calls(rank)])}
    assert once.keys() == twice.keys()
    for key, merged in once.items():
        assert merged.value is not None and twice[key].value is not None
        assert float(merged.value) == pytest.approx(float(twice[key].value), abs=1e-9)  # type: ignore[arg-type]
        assert merged.weight == twice[key].weight


def test_means_are_weighted_by_batch_size() -> None:
    (merged,) = merge_calls([call("x", 1.0, 3), call("x", 5.0, 1)])
    assert merged.value == 2.0 and merged.weight == 4


def test_a_call_as_plain_data() -> None:
    again = LogCall.from_plain(codec.decode(codec.encode(call("x", 0.1, 2).plain())))
    assert again.options == options("x") and again.value == 0.1 and again.weight == 2


def recorded(**settings: Any) -> LogCall:
    results = RecordingResults(True)
    with results.recording([torch.ones(6, 2)]) as calls:
        results.log("training_step", "x", torch.tensor(2.0), **settings)
    assert not results, "nothing goes to Lightning's own results yet"
    return calls[0]


@pytest.mark.parametrize(
    ("settings", "reduce", "weight"),
    [
        ({}, "mean", 6),
        ({"batch_size": 3}, "mean", 3),
        ({"reduce_fx": torch.sum}, "sum", 1),
        ({"reduce_fx": "max"}, "max", 1),
        ({"reduce_fx": "MAX"}, "max", 1),
        ({"reduce_fx": min}, "min", 1),
        ({"on_step": True, "on_epoch": False}, "mean", 1),
    ],
)
def test_recording(settings: dict[str, Any], reduce: str, weight: float) -> None:
    logged = recorded(**settings)
    assert (logged.options[6], logged.weight) == (reduce, weight)


def test_accumulated_results_pass_to_a_joiner() -> None:
    donor, joiner = RecordingResults(True), RecordingResults(True)
    module = nn.Module()
    for value in (1.0, 4.0):
        donor.replay(call("x", value, 2), module, torch.device("cpu"))
        donor.replay(call("y", value, 1, "sum"), module, torch.device("cpu"))
    joiner.load_state(codec.decode(codec.encode(donor.state())), torch.device("cpu"))
    for results in (donor, joiner):
        results.replay(call("x", 10.0, 4), module, torch.device("cpu"))
        results.replay(call("y", 10.0, 1, "sum"), module, torch.device("cpu"))
    first, second = donor.metrics(False)["callback"], joiner.metrics(False)["callback"]
    assert {k: float(v) for k, v in first.items()} == {k: float(v) for k, v in second.items()}
    assert float(first["x"]) == pytest.approx((2 * 1 + 2 * 4 + 4 * 10) / 8) and float(first["y"]) == 15


def hook_log(results: RecordingResults, value: float, **settings: Any) -> None:
    """Log as Lightning does for ``self.log`` in a hook."""
    basic = {"prog_bar": False, "logger": True, "on_step": True, "on_epoch": True, "reduce_fx": "mean"}
    results.log(
        "on_train_batch_end",
        "lr",
        torch.tensor(value),
        **basic | {"batch_size": 1, "sync_dist_fn": lambda value, **_: value} | settings,
    )


def test_hooks_weights_do_not_depend_on_the_present_world() -> None:
    """A rank's own part of a step, which Lightning would weight by, is larger in a smaller world."""
    means = []
    for share in (slice(0, 1), slice(0, 2)):
        results = RecordingResults(True)
        for step, part in ((0, share), (1, slice(0, 1))):
            shared: Any = (lambda number: [torch.ones(4, 2)], lambda number: 4, lambda whole, p=part: list(whole[p]))
            results.batch = GlobalBatch(0, step, range(2), *shared)
            results.batch_size = None
            hook_log(results, float(step), batch_size=None)
        means.append(float(results.metrics(False)["callback"]["lr"]))
    assert means == [0.5, 0.5]


@pytest.mark.parametrize("settings", [{}, {"sync_dist": True}, {"reduce_fx": max}, {"enable_graph": True}])
def test_a_joiner_goes_on_with_what_hooks_have_logged(settings: dict[str, Any]) -> None:
    """Even if its own hooks have logged values before it had the state."""
    donor, joiner = RecordingResults(True), RecordingResults(True)
    hook_log(donor, 1.0, **settings)
    hook_log(joiner, 7.0, **settings)
    joiner.load_state(codec.decode(codec.encode(donor.state())), torch.device("cpu"))
    for results in (donor, joiner):
        hook_log(results, 4.0, **settings)
    first, second = donor.metrics(False)["callback"], joiner.metrics(False)["callback"]
    assert first == second and float(first["lr"]) == (4.0 if "reduce_fx" in settings else 2.5)


class Rank:
    """One rank's steps with `StepSums`; if ``uneven``, only the first micro-batch uses the bias."""

    def __init__(self, engine: Engine, steps: Sequence[dict[int, list[LogCall]]], *, uneven: bool = True) -> None:
        self.engine, self.steps, self.uneven = engine, steps, uneven
        self.module = nn.Linear(1, 1)
        self.seen: list[tuple[float, dict[str, float], list[bool]]] = []

    def __call__(self) -> Rank:
        self.engine.run(Agreement("start", lambda rank: b""))
        buckets = GradientBuckets(self.module.named_parameters(), 1, True)
        layout, norms = SumsLayout(), NormStatistics(self.module)
        for calls in self.steps:
            buckets.begin()
            sums = StepSums(layout, norms, ModuleBuffers(nn.Module()), buckets)

            def run(micro_batch: int, sums: StepSums = sums, calls: dict[int, list[LogCall]] = calls) -> None:
                partly = micro_batch and self.uneven
                out = self.module.weight.sum() if partly else self.module(torch.ones(1, 1)).sum()
                out.backward()
                sums.add(torch.tensor(float(micro_batch)), calls[micro_batch])

            operation = GradientStep(sorted(calls), buckets, sums, run)
            self.engine.run(operation)
            self.recomputed = operation.recomputed
            self.engine.step += 1
            loss, merged, used = sums.finish()
            values = {c.options[1]: float(c.value) for c in merged if c.value is not None}
            self.seen.append((float(loss), values, used))
        buckets.close()
        self.engine.close()
        return self


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_steps_log_the_same_in_any_world(world: int) -> None:
    """Even if only one micro-batch logs a value, a new value, or none."""
    steps: list[dict[int, list[LogCall]]] = [
        {0: [call("a", 1.0, 2)], 1: [call("a", 3.0, 2)], 2: [call("a", 5.0, 4), call("low", 7.0, 1, "min")]},
        {0: [call("a", 1.0)], 1: [call("a", 2.0)], 2: [call("a", 3.0)]},
        {0: [], 1: [call("a", 2.0)], 2: [call("new", 3.0, 1, "sum"), call("low", 1.0, 1, "min")]},
        {0: [], 1: [], 2: []},
    ]
    coordinator = Coordinator()
    ranks = [(f"w{r}", Rank(coordinator.worker(f"w{r}"), steps)) for r in range(world)]
    coordinator.start()
    for rank in run_threads(coordinator, ranks).values():
        losses, values, used = zip(*rank.seen, strict=True)
        assert losses == (1.0,) * 4
        assert values == ({"a": 3.5, "low": 7.0}, {"a": 2.0}, {"a": 2.0, "new": 3.0, "low": 1.0}, {})
        assert used == ([True, True],) * 4


@pytest.mark.parametrize(("logged", "recomputed"), [("a", []), ("new", [2])])
def test_what_only_a_dead_rank_has_logged_is_in_the_last_bucket(logged: str, recomputed: list[int]) -> None:
    """Unless the ranks have to exchange records: then its micro-batches are computed again."""
    steps: list[dict[int, list[LogCall]]] = [
        {number: [call("a", 1.0)] for number in range(3)},
        {0: [], 1: [], 2: [call(logged, 7.0)]},
    ]
    coordinator = Coordinator()
    ranks = {name: Rank(coordinator.worker(name), steps, uneven=False) for name in ("w0", "w1", "w2")}
    voting: set[str] = set()

    def note(name: str) -> Callable[..., None]:
        return lambda *point: voting.add(name) if point[0] == "reduced" and point[1] == len(steps) - 1 else None

    for name in ("w0", "w1"):
        ranks[name].engine.fault = note(name)
    ranks["w2"].engine.fault = LateFault(("reduced", 1), lambda: len(voting) == 2)
    coordinator.start()
    run_threads(coordinator, list(ranks.items()))
    for name in voting:
        assert ranks[name].seen[1] == (1.0, {logged: 7.0}, [True, True])
        assert ranks[name].recomputed == recomputed


def test_norm_statistics_do_not_depend_on_who_computes() -> None:
    torch.manual_seed(0)
    data, layer = torch.randn(6, 4, 3), nn.BatchNorm1d(3)
    norms = NormStatistics(layer)
    assert norms.bucket is not None
    norms.begin()
    for micro_batch in data:
        layer(micro_batch)
        norms.finish_micro_batch()
        assert layer.running_mean is not None and layer.running_mean.eq(0).all(), "each starts from the step's"
    norms.bucket.reduced.copy_(norms.bucket.local)
    norms.commit(6)
    assert layer.running_mean is not None and torch.allclose(layer.running_mean, 0.1 * data.mean((0, 1)), atol=1e-6)
    assert layer.num_batches_tracked == 1


def test_statistics_that_code_replaces_between_and_in_steps_are_followed() -> None:
    """As `StochasticWeightAveraging` does before its pass over the data."""
    torch.manual_seed(0)
    data, layer = torch.randn(4, 5, 3, dtype=torch.float64), nn.BatchNorm1d(3).double()
    norms = NormStatistics(layer)
    layer.running_mean = torch.zeros_like(layer.running_mean)
    layer.num_batches_tracked *= 0
    layer.momentum = None
    norms.begin()
    for micro_batch in data:
        layer.running_mean = layer.running_mean.clone()
        layer(micro_batch)
        norms.finish_micro_batch()
    assert norms.bucket is not None
    norms.bucket.reduced.copy_(norms.bucket.local)
    norms.commit(4)
    assert torch.allclose(layer.running_mean, data.mean((0, 1)), atol=1e-15), "in the statistics' own precision"


def test_layers_that_begin_and_end_to_track_their_statistics() -> None:
    """As `BaseFinetuning` does when it freezes and unfreezes layers."""
    layer = nn.BatchNorm1d(3)
    layer.track_running_stats = False
    norms = NormStatistics(layer)
    assert norms.bucket is None
    layer.track_running_stats = True
    norms.begin()
    assert norms.bucket is not None and norms.bucket.local.numel() == 7


class Metrics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.error = torchmetrics.MeanSquaredError()
        self.mean = torchmetrics.MeanMetric()
        self.largest = torchmetrics.MaxMetric()
        self.kept = torchmetrics.CatMetric()
        self.correlation = torchmetrics.PearsonCorrCoef()
        self.unused = torchmetrics.SumMetric()

    def update(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.error.update(x, y)
        self.mean.update(x)
        self.largest.update(x)
        self.kept.update(x)
        self.correlation.update(x, y)

    def values(self) -> list[Any]:
        return [float(m.compute()) for m in (self.error, self.mean, self.largest, self.correlation)] + [
            sorted(self.kept.compute().tolist())
        ]


@pytest.mark.parametrize(
    "shares", [[range(3), range(3, 6)], [range(6), range(0)], [range(2), range(2, 3), range(3, 6)]]
)
def test_metric_objects_have_the_whole_datas_value(shares: list[range]) -> None:
    x, y = torch.randn(6, 5), torch.randn(6, 5)
    whole, ranks = Metrics(), [Metrics() for _ in shares]
    for number in range(6):
        whole.update(x[number], y[number])
    for rank, own in zip(ranks, shares, strict=True):
        for number in own:
            rank.update(x[number], y[number])
    states = [codec.decode(codec.encode(StepMetrics(rank).states())) for rank in ranks]
    for rank in ranks:
        merge_metric_states(rank, {}, states)
        assert rank.values()[:-1] == pytest.approx(whole.values()[:-1], rel=1e-5)
        assert rank.values()[-1] == pytest.approx(whole.values()[-1])
        assert not rank.unused.update_called


class Grouped(Metrics):
    """A module with a collection in which two metrics share a state."""

    def __init__(self) -> None:
        super().__init__()
        kinds = (torchmetrics.Accuracy, torchmetrics.F1Score, torchmetrics.AUROC)
        self.all = torchmetrics.MetricCollection([kind(task="binary") for kind in kinds])

    def update(self, x: torch.Tensor, y: torch.Tensor) -> None:
        super().update(x, y)
        self.all(x.sigmoid(), (y > 0).long())

    def values(self) -> list[Any]:
        return [*(float(value) for value in self.all.compute().values()), *super().values()]


def test_metric_objects_do_not_synchronise_by_themselves() -> None:
    """Even if training begins without a sanity check: after each step all ranks have the whole state already."""
    module = Grouped()
    StepMetrics(module)
    metrics = [each for each in module.modules() if isinstance(each, torchmetrics.Metric)]
    assert len(metrics) == 9 and not any(each.distributed_available_fn() for each in metrics)
    assert all(each.distributed_available_fn is never for each in metrics)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("resets", [True, False])
def test_metric_objects_of_training_and_evaluation(world: int, resets: bool) -> None:
    """Training's part counts once, whatever the world, through several passes with and without updates."""
    x, y = torch.randn(9, 40), torch.randn(9, 40)
    whole, ranks = Grouped(), [Grouped() for _ in range(world)]
    for number in range(9):
        if number % 3 == 0:
            whole.update(x[number], y[number])
            recorded = {}
            for place, rank in enumerate(ranks):
                steps = StepMetrics(rank)
                steps.begin()
                if place == number % world:
                    steps.start_micro_batch()
                    rank.update(x[number], y[number])
                    steps.finish_micro_batch(0)
                    recorded = steps.recorded
            for rank in ranks:
                steps = StepMetrics(rank)
                steps.begin()
                steps.commit(recorded)
        for batches in ([number], []):
            common = [set_common_aside(rank) for rank in ranks]
            for batch in batches:
                whole.update(x[batch], y[batch])
                ranks[batch % world].update(x[batch], y[batch])
            states = [StepMetrics(rank).states() for rank in ranks]
            for rank, own in zip(ranks, common, strict=True):
                merge_metric_states(rank, own, states)
                assert rank.values()[:-1] == pytest.approx(whole.values()[:-1], rel=1e-4)
                assert rank.values()[-1] == pytest.approx(whole.values()[-1])
        if resets and number == 4:
            for each in (whole, *ranks):
                for metric in each.modules():
                    if isinstance(metric, torchmetrics.Metric):
                        metric.reset()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_metric_objects_in_training_have_the_global_batches_value(world: int) -> None:
    """On every rank, including one without micro-batches, and one that joins after the second of four steps."""
    x, y = torch.randn(4, 2, 40), torch.randn(4, 2, 40)
    whole, ranks = Grouped(), [Grouped() for _ in range(world)]
    steps = [StepMetrics(rank) for rank in ranks]
    for step in range(4):
        if step == 2:
            ranks.append(Grouped())
            steps.append(StepMetrics(ranks[-1]))
            steps[-1].load_states(codec.decode(codec.encode(steps[0].states())))
        for metrics in steps:
            metrics.begin(anew=True)
        for number in range(2):
            whole.update(x[step, number], y[step, number])
            place = number % len(ranks)
            steps[place].start_micro_batch()
            ranks[place].update(x[step, number], y[step, number])
            steps[place].finish_micro_batch(number)
        recorded = [codec.decode(codec.encode(metrics.recorded)) for metrics in steps]
        for metrics in steps:
            metrics.commit({number: states for part in recorded for number, states in part.items()})
    for rank in ranks:
        assert rank.values()[:-1] == pytest.approx(whole.values()[:-1], rel=1e-4)
        assert rank.values()[-1] == pytest.approx(whole.values()[-1])
        assert not rank.unused.update_called
