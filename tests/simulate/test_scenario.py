"""From a workload's configuration to cluster and tasks."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest
from experiment_cases import composed
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from unicron_lightning.errors import ConfigError
from unicron_lightning.sections import read_section
from unicron_lightning.simulate.accounts import optimum
from unicron_lightning.simulate.settings import SizeConfig, WorkloadConfig, scene, system_of

TABLE = {"points": [{"workers": n, "tflops_per_worker": 100} for n in (8, 64)], "beyond": "extend"}
NODES = {"num_nodes": 4, "workers_per_node": 8}


def preset(name: str) -> WorkloadConfig:
    with initialize_config_module("unicron_lightning.conf.simulate", version_base="1.3"):
        data = OmegaConf.to_container(compose(config_name=f"workload/{name}").workload)
        return read_section(WorkloadConfig, data, "workload")


@pytest.mark.parametrize("name", ["six", "sizes", "equal", "weights"])
def test_presets_for_128_workers_run_all_their_tasks(name: str) -> None:
    cluster, tasks = scene(preset(name), SizeConfig())
    assert (cluster.num_workers, len(tasks)) == (128, 6)
    shares = optimum(tasks, cluster.num_places, cluster.place_workers)
    assert min(shares.values()) >= 1
    assert sum(shares.values()) == 16
    weights = {task.terms.weight for task in tasks}
    sizes = {task.flops_per_step for task in tasks}
    assert (len(weights) > 1, len(sizes) > 1) == {
        "six": (True, True),
        "sizes": (False, True),
        "equal": (False, False),
        "weights": (True, False),
    }[name]


def test_tasks_come_and_go() -> None:
    _, tasks = scene(preset("churn"), SizeConfig())
    visits = [task for task in tasks if task.departure is not None]
    assert [task.arrival / 3600 for task in visits] == [12 + 24 * index for index in range(7)]
    assert {task.departure - task.arrival for task in visits} == {72 * 3600.0}
    assert sum(task.arrival == 0 for task in tasks) == 2


def test_llama3_has_the_published_speed() -> None:
    cluster, (task,) = scene(preset("llama3"), SizeConfig())
    assert (cluster.num_workers, task.terms.max_workers) == (16_384 + 1024, 16_384)
    assert task.throughput(16_384) == pytest.approx(16_384 * 400e12)
    # 16 M tokens of 405 B parameters: 6 FLOPs each.
    assert task.flops_per_step == pytest.approx(6 * 405e9 * 16e6, rel=0.01)


def test_the_cluster_can_be_another() -> None:
    cluster, tasks = scene(preset("many"), SizeConfig(num_nodes=1250, cell=10))
    assert (cluster.num_nodes, cluster.cell, len(tasks)) == (1250, 10, 256)


def test_a_file_for_the_planner_is_a_workload(tmp_path: Path) -> None:
    text = resources.files("unicron_lightning.conf").joinpath("examples/six_tasks_128_gpus.yaml").read_text()
    (tmp_path / "cluster.yaml").write_text(text)
    cluster, tasks = scene(WorkloadConfig(name="own", file="cluster.yaml"), SizeConfig(), tmp_path)
    assert (cluster.num_nodes, cluster.workers_per_node) == (16, 8)
    measured = {task.name: task for task in tasks}["measured"]
    assert (measured.terms.weight, measured.terms.granularity, measured.terms.max_workers) == (1.5, 8, 32)
    assert measured.throughput(16) == pytest.approx(16 * 141e12)


@pytest.mark.parametrize(
    ("workload", "size", "message"),
    [
        ({"tasks": {"x": {"performance": TABLE}}}, {}, r"num_nodes=None, workers_per_node=None: expected both"),
        ({"cluster": NODES}, {}, r"no tasks: expected at least one"),
        ({"cluster": NODES, "tasks": {"x": {}}}, {}, r"workload.tasks.x.performance is missing"),
        ({"cluster": NODES, "tasks": {"x": {"performance": TABLE, "wait": 1}}}, {}, r"x.wait=1: unknown key"),
        ({"cluster": NODES, "tasks": {"x": {"performance": {}}}}, {}, r"given by nothing: expected exactly one"),
        ({"cluster": NODES, "tasks": {"x": {"performance": TABLE, "copies": 0}}}, {}, r"copies=0"),
        ({"cluster": NODES, "tasks": {"x": {"performance": TABLE, "quantum": 0}}}, {}, r"quantum=0"),
        ({"cluster": NODES, "tasks": {"x": {"performance": TABLE}}}, {"cell": 3}, r"cell=3: expected a divisor"),
        (
            {"cluster": NODES, "tasks": {"x": {"performance": TABLE, "min_workers": 4}}},
            {},
            r"T\(t,x\)=0 at min_workers=4",
        ),
        ({"file": "nothing.yaml"}, {}, r"nothing.yaml"),
    ],
)
def test_what_is_wrong_is_quoted(workload: dict, size: dict, message: str, tmp_path: Path) -> None:
    sizes = read_section(SizeConfig, size, "cluster")
    with pytest.raises(ConfigError, match=message):
        scene(read_section(WorkloadConfig, {"name": "x", **workload}, "workload"), sizes, tmp_path)


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("hope", r"policy='hope': expected one of unicron, .*, or MODULE.CLASS of your own"),
        ("no_such_module.Policy", r"policy='no_such_module.Policy': No module named 'no_such_module': expected"),
        ("math.pi", r"policy='math.pi': expected a subclass of .*policy.Policy with a `name`"),
    ],
)
def test_a_policy_that_does_not_exist_is_refused(policy: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        system_of(policy)


def test_a_policy_of_ones_own_has_the_costs_that_it_names() -> None:
    assert system_of("unicron_lightning.simulate.policy.TorchFT") == "torchft"
    assert system_of("unicron_no_planner") == "unicron"


@pytest.mark.parametrize(("key", "said"), [("num_nodes", "cluster.num_nodes=0"), ("cell", "cluster.cell=0")])
def test_a_size_of_zero_is_named(key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"{said}: expected a whole number of at least 1"):
        composed((f"cluster.{key}=0",)).scene()
