"""Workers join and are terminated while the training changes: all changes reach later workers."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
from agent.torchrun import Cluster
from programs import changing_worker
from programs.launching import PROGRAMS

from unicron_lightning.local_cluster.processes import until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

FREEZE_STEP = changing_worker.FREEZE_STEP
START = 90.0
"""Seconds that a worker may take to start, on a busy machine."""
WEIGHT_BIAS = ("weight", "bias")


class Run:
    """The results of a finished run."""

    def __init__(self, cluster: Cluster, founder: int) -> None:
        self.events = [(event["name"], event["fields"]) for event in cluster.events()]
        self.founder = founder
        self.logs = "".join(path.read_text() for path in cluster.folder.glob("agent-*.log"))
        self.steps = cluster.notes("step")
        self.validated = cluster.notes("validated")
        self.results = [torch.load(path, weights_only=False) for path in cluster.folder.glob("result-*.pt")]


def world_of_two(cluster: Cluster) -> tuple[int, int] | None:
    """The processes by rank, once each has finished a step in such a world."""
    pids = {line["rank"]: line["pid"] for line in cluster.notes("step", world=2)}
    return (pids[0], pids[1]) if len(pids) == 2 else None


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One agent trains alone past all changes, and a second one joins. The first worker, which has seen the changes, is
    then terminated, and the second one passes them on to its replacement.
    """
    folder = tmp_path_factory.mktemp("changing")
    with Cluster(folder, str(PROGRAMS / "changing_worker.py"), "1:2") as cluster:
        cluster.add_node()
        until("the changes", lambda: any(line["step"] > FREEZE_STEP for line in cluster.notes("step")), START)
        cluster.add_node()
        founder, joiner = until("a world of two", lambda: world_of_two(cluster), START)
        (folder / f"terminate-training_step-{founder}").touch()
        pair = {founder, joiner}
        until("another joiner", lambda: {line["pid"] for line in cluster.notes("step", world=2)} - pair, START)
        assert cluster.finish() == [0, 0]
        return Run(cluster, founder)


@pytest.fixture(scope="module")
def alone(run: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same training without joins and failures."""
    with pytest.MonkeyPatch.context() as variables:
        for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # set inside, restored at the end
            variables.setenv(name, "0")
        return changing_worker.train(tmp_path_factory.mktemp("alone"), run.results[0]["epochs"], 0.0)


def test_a_terminated_worker_has_not_finished_the_task(run: Run) -> None:
    """An exit with 0 would finish the task for the coordinator, and no worker could join any more."""
    ends = [name for name, _ in run.events if name in ("worker_died", "worker_finished")]
    assert ends == ["worker_died", "worker_finished", "worker_finished"]
    assert f"(exitcode: {128 + signal.SIGTERM}) local_rank: 0 (pid: {run.founder})" in run.logs


def test_a_script_may_evaluate_before_it_trains(run: Run) -> None:
    """A joiner evaluates alone, over all data and with its untrained model, and then joins."""
    first, *joiners = (line["results"] for line in run.validated)
    assert len(joiners) == 2 and all(results == first for results in joiners)
    assert len({line["pid"] for line in run.steps}) == 3


def test_the_result_is_that_of_a_world_of_one(run: Run, alone: dict[str, Any]) -> None:
    assert len(run.results) == 2
    for result in run.results:
        assert (result["steps"], result["epochs"]) == (alone["steps"], alone["epochs"])
        for part in ("state", "momenta"):
            assert result[part].keys() == alone[part].keys()
            for name, value in alone[part].items():
                assert torch.allclose(result[part][name], value, rtol=1e-4, atol=1e-5), (part, name)


def test_frozen_parameters_and_groups_reach_joiners(run: Run, alone: dict[str, Any]) -> None:
    """The remaining workers have not seen the changes happen."""
    assert {line["pid"] for line in run.steps if line["step"] <= FREEZE_STEP + 1} == {run.founder}
    for result in (alone, *run.results):
        assert result["trained"] == [*(f"{part}.{name}" for part in ("norm", "head", "extra") for name in WEIGHT_BIAS)]
        assert [rate for rate, _ in result["groups"]] == [0.02, 0.005]
        assert result["groups"][1][1] == ["extra.weight", "extra.bias"]


def test_what_hooks_log_is_as_in_a_world_of_one(run: Run, alone: dict[str, Any]) -> None:
    """A later worker has logged it in other steps only, or not at all."""
    for result in (alone, *run.results):
        values = {name: value for name, value in result["metrics"].items() if name.startswith("hook_")}
        rates = {"hook_rate": 1.0, "hook_rate_step": 1.0, "hook_rate_epoch": 1.0}
        assert values == pytest.approx({"hook_epoch": alone["epochs"] - 1, "hook_lr": 0.02, "hook_share": 1.0, **rates})


def test_batch_norm_counts_steps_on_everyone(run: Run, alone: dict[str, Any]) -> None:
    """Steps are counted, not micro-batches, of which a step has one or two; one of two workers computes one or none."""
    for result in (alone, *run.results):
        assert result["state"]["norm.num_batches_tracked"] == result["steps"]


def test_metric_objects_of_several_loaders_are_those_of_all_data(run: Run, alone: dict[str, Any]) -> None:
    """Including loaders without batches for a worker."""
    places = range(len(changing_worker.VALIDATION_BATCHES))
    names = {f"{name}/dataloader_idx_{place}" for name in ("error", "largest", "plain") for place in places}
    for result in (alone, *run.results):
        hooks = {name for name in result["metrics"] if name.startswith(("hook_", "train_"))}
        assert result["metrics"].keys() - hooks == names
        for name, value in alone["metrics"].items():
            assert result["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
        for place, part in enumerate(changing_worker.validation_data()):
            assert result["metrics"][f"largest/dataloader_idx_{place}"] == pytest.approx(float(part.tensors[0].max()))
            error = result["metrics"][f"plain/dataloader_idx_{place}"]
            assert result["metrics"][f"error/dataloader_idx_{place}"] == pytest.approx(error, rel=1e-4)
