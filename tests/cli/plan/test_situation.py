"""From a file's contents to the planner's values: nodes, failure rates, performance models, running workers."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from unicron_lightning.cli.plan.situation import (
    FailuresConfig,
    NodeConfig,
    PerformanceConfig,
    PlanClusterConfig,
    PlanConfig,
    PlanTaskConfig,
    failure_model,
    nodes_of,
    situation_of,
)
from unicron_lightning.errors import ConfigError
from unicron_lightning.planner.fleet import solve_fleet
from unicron_lightning.planner.performance.description import ModelShape, TransformerProfile
from unicron_lightning.planner.placement import NodeCapacity

HERE = Path()
HOUR = 3600.0
FAILURES = FailuresConfig(worker_mtbf_hours=1000)


def task(flops: dict[int, float], **rest: object) -> PlanTaskConfig:
    return PlanTaskConfig(**{"performance": PerformanceConfig(flops=flops), "transition_seconds": 1.0} | rest)


def test_equal_nodes_are_numbered_and_those_named_replace_them() -> None:
    config = PlanClusterConfig(
        num_nodes=11,
        workers_per_node=4,
        nodes={"node03": NodeConfig(state="draining"), "big": NodeConfig(num_accelerators=16)},
    )
    nodes = {node.name: node for node in nodes_of(config)}
    assert list(nodes) == [*(f"node{index:02}" for index in range(11)), "big"]
    assert nodes["node03"] == NodeCapacity(name="node03", num_accelerators=4, state="draining")
    assert nodes["big"] == NodeCapacity(name="big", num_accelerators=16)


def test_the_mtbf_is_corrected_by_what_was_seen() -> None:
    given = failure_model(FailuresConfig(node_mtbf_hours=1000), 8)
    assert given.running_seconds(80) == pytest.approx(100 * HOUR)
    # 1 failure expected in 1000 h, 4 seen in 1500 h: 5 in 2500 h
    seen = failure_model(FailuresConfig(node_mtbf_hours=1000, node_failures=4, node_hours=1500), 8)
    assert seen.running_seconds(80) == pytest.approx(50 * HOUR)
    firm = FailuresConfig(node_mtbf_hours=1000, node_failures=4, node_hours=1500, prior_failures=100)
    assert failure_model(firm, 8).running_seconds(80) == pytest.approx(101_500 / 104 / 10 * HOUR)
    both = failure_model(FailuresConfig(node_mtbf_hours=1000, worker_mtbf_hours=8000), 8)
    assert both.running_seconds(80) == pytest.approx(50 * HOUR)


def test_a_shape_keeps_the_mean_lifetime() -> None:
    wear = failure_model(FailuresConfig(worker_mtbf_hours=1000, worker_shape=2.0), 8)
    assert wear.worker is not None
    assert wear.worker.mean_lifetime_seconds == pytest.approx(1000 * HOUR)
    # mean residual life of one: E[T^2] / (2 E[T])
    assert wear.running_seconds(1) == pytest.approx(1000 * HOUR * 2 / math.pi, rel=1e-6)


def test_what_runs_on_lost_nodes_counts_as_lost() -> None:
    config = PlanConfig(
        cluster=PlanClusterConfig(num_nodes=3, workers_per_node=4, nodes={"node1": NodeConfig(state="failed")}),
        failures=FAILURES,
        tasks={"a": task({1: 1e15, 8: 5e15}, accelerators={"node0": 4, "node1": 4})},
    )
    situation = situation_of(config, HERE)
    assert (situation.fleet.num_workers, dict(situation.fleet.kinds[""].lost)) == (8, {"a": 4})
    placement = situation.place(solve_fleet(situation.fleet))
    assert placement.of_task("a") == {"node0": 4, "node2": 4}
    assert placement.num_moved == 4
    assert not situation.assumed


def test_what_only_has_a_number_is_put_beside_what_has_a_place() -> None:
    config = PlanConfig(
        cluster=PlanClusterConfig(num_nodes=2, workers_per_node=4),
        failures=FAILURES,
        tasks={"a": task({1: 1e15}, accelerators={"node0": 3}), "b": task({1: 1e15}, workers=5)},
    )
    situation = situation_of(config, HERE)
    assert situation.assumed
    assert {node: dict(tasks) for node, tasks in situation.running.items()} == {
        "node0": {"a": 3, "b": 1},
        "node1": {"b": 4},
    }


def test_groups_come_from_the_configuration_or_from_the_file() -> None:
    row = {"workers": 6, "flops_per_second": 1e15}
    layout = {"tensor_parallel": 3, "pipeline_parallel": 2, "data_parallel": 1, "micro_batch_size": 1}
    known = PlanTaskConfig(performance=PerformanceConfig(points=[row | layout]), transition_seconds=1, max_workers=6)
    cluster = PlanClusterConfig(num_nodes=3, workers_per_node=4)
    # 6 workers of TP3 x PP2 on nodes of 4, so groups of 3 should share a node: 4 + 2
    for each, spanning in ((known, 3), (dataclasses.replace(known, group_size=2, replica_size=2), 0)):
        situation = situation_of(PlanConfig(cluster=cluster, failures=FAILURES, tasks={"a": each}), HERE)
        placement = situation.place(solve_fleet(situation.fleet))
        assert placement.of_task("a") == {"node0": 4, "node1": 2}
        assert placement.num_spanning == {"a": spanning}


def test_a_transformer_is_modelled_on_the_clusters_accelerators() -> None:
    shape = {"num_layers": 24, "hidden_size": 2304, "num_heads": 24, "sequence_length": 2048, "vocabulary_size": 51200}
    performance = PerformanceConfig(transformer=TransformerProfile(**shape, global_batch_size=512))
    tasks = {"a": PlanTaskConfig(performance=performance, transition_seconds=1)}
    config = PlanConfig(cluster=PlanClusterConfig(num_nodes=2, accelerator="A800"), failures=FAILURES, tasks=tasks)
    model = situation_of(config, HERE).fleet.tasks["a"][""].task.performance
    assert model.shape == ModelShape(**shape)
    assert 0.3 * 16 * 312e12 < model.throughput(16) < 0.9 * 16 * 312e12
    half = model.throughput(16) / 2
    measured = PerformanceConfig(
        transformer=TransformerProfile(**shape, global_batch_size=512, uneven_shares=True),
        measured=[{"workers": 16, "flops_per_second": half}],
    )
    told = dataclasses.replace(tasks["a"], performance=measured)
    corrected = (
        situation_of(dataclasses.replace(config, tasks={"a": told}, caution=0.5), HERE).fleet.tasks["a"][""].task
    )
    assert corrected.performance.throughput(16) == pytest.approx(half, rel=0.05), "a measured step outweighs the model"
    assert corrected.performance.throughput(8) < 0.8 * model.throughput(8)
    assert corrected.performance.prior.space.uneven_shares and corrected.caution == 0.5
    nameless = dataclasses.replace(config, cluster=PlanClusterConfig(num_nodes=2))
    with pytest.raises(
        ConfigError, match=r"tasks\.a: cluster\.accelerator=None: expected one of A100, A800, H100, H200"
    ):
        situation_of(nameless, HERE)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"queued": {"a": task({1: 1.0})}}, "queued.a: also in tasks"),
        ({"tasks": {}}, "tasks: {}: expected at least one task in tasks or queued"),
        ({"cluster": PlanClusterConfig(num_nodes=1, unit=0)}, "cluster.unit=0: expected a whole number of at least 1"),
        (
            {"cluster": PlanClusterConfig(nodes={"x": NodeConfig(num_accelerators=-1)})},
            "cluster.nodes.x.num_accelerators=-1: expected",
        ),
        ({"failures": FailuresConfig()}, "failures: expected worker_mtbf_hours, node_mtbf_hours, or both"),
        ({"failures": FailuresConfig(worker_mtbf_hours=1, worker_shape=0)}, "shape=0: expected a number > 0"),
        ({"failures": FailuresConfig(worker_mtbf_hours=1, worker_shape=99)}, "shape=99: expected 0.25 to 8.0"),
        ({"tasks": {"a": task({1: 1.0}, workers=9)}}, "num_workers=8: expected at least the 9 that tasks have"),
        ({"tasks": {"a": task({0: 1.0})}}, "tasks.a: table row 1: workers=0: expected a whole number of at least 1"),
    ],
)
def test_contradictions_are_refused_in_words(change: dict[str, object], words: str) -> None:
    config = PlanConfig(cluster=PlanClusterConfig(num_nodes=1), failures=FAILURES, tasks={"a": task({1: 1.0})})
    with pytest.raises(ConfigError) as caught:
        situation_of(dataclasses.replace(config, **change), HERE)
    assert words in str(caught.value)
