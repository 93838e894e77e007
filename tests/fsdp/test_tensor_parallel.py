"""FSDP2 with tensor parallelism: replicas of S lanes of T workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp.judge import notes
from fsdp.test_model_parallel import compare
from fsdp.test_training import check, die, run
from system.cluster import Cluster

from unicron_lightning.fsdp.export import export_checkpoint

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).with_name("tensor_parallel.py")


@pytest.mark.chaos  # the kills below are compared with one process, too
@pytest.mark.parametrize(("shards", "replicas", "stream"), [(1, 2, None), (2, 1, {})])
def test_an_undisturbed_run_equals_one_process(
    tmp_path: Path, shards: int, replicas: int, stream: dict[str, Any] | None
) -> None:
    """Its checkpoints too, which are files with whole tensors."""
    settings: dict[str, Any] = {"steps": 8, "full": 4, "validate": 3, "shards": shards, "replicas": replicas}
    settings |= {"slices": 2, "dropout": 0.1, "reference": "unicron", "save_every": 4, "stream": stream}
    settings["experts"] = 4 if stream is None else 0  # two on each worker of a lane
    run(tmp_path, settings, [], 4, "4:4")
    check(tmp_path, settings, 4)
    own, expected = (
        torch.load(folder / "checkpoints" / "step=4.ckpt", weights_only=True)
        for folder in (tmp_path, tmp_path / "alone")
    )
    compare(own, expected, 1e-10)
    [state], [wanted] = own["optimizer_states"], expected["optimizer_states"]
    for number, values in wanted["state"].items():
        for name, value in values.items():
            torch.testing.assert_close(state["state"][number][name], value, rtol=0, atol=1e-10)


SCHEDULE = [
    die("forward", 0, 1),
    die("validation", 1, 0),
    die("backward", 1, 1, nth=1),
    die("reduction", 0, 0),
    die("commit", 0, 1),
    die("optimizer", 1, 1),
]


@pytest.mark.parametrize(
    ("accelerated", "experts"),
    [(True, 0), *(pytest.param(False, number, marks=pytest.mark.chaos) for number in (0, 4))],
)
def test_kills_heal(tmp_path: Path, accelerated: bool, experts: int) -> None:
    """Also with groups like those of NCCL, and beside checkpoints on disk and in memory."""
    settings: dict[str, Any] = {"steps": 12, "full": 4, "validate": 5, "shards": 1, "slices": 2}
    settings |= {"dropout": 0.1, "reference": "unicron", "stand_in": accelerated, "options": {"digest_every": 1}}
    settings |= {"memory": [3, 1], "save_every": 4, "beside": True, "experts": experts}
    run(tmp_path, settings, SCHEDULE, 5, "2:4")
    assert bool(list(tmp_path.glob("garbage-*"))) == accelerated, "no collective of a survivor was aborted"
    assert [note["point"] for note in notes(tmp_path, "fault")] == [fault["point"] for fault in SCHEDULE]
    check(tmp_path, settings, 4)


@pytest.mark.chaos
@pytest.mark.parametrize("shards", [1, 2])
def test_a_reproducible_run_has_the_same_bits_through_deaths(tmp_path: Path, shards: int) -> None:
    """With one of two replicas, and with both and deaths: loss and norm of each step have the same bits."""
    settings: dict[str, Any] = {"steps": 12, "shards": shards, "slices": 2, "dropout": 0.1, "dtype": "float32"}
    settings["options"] = {"reproducible": True, "digest_every": 1}
    schedule = [die("backward", 1, 1, nth=1), die("commit", 0, 0), die("reduce", 1, 0)]
    found: dict[int, dict[int, set[tuple[float, float]]]] = {}
    for replicas in (1, 2):
        folder, workers = tmp_path / f"{replicas}", 2 * shards * replicas
        folder.mkdir()
        faults = schedule if replicas == 2 else []
        run(folder, {**settings, "full": workers}, faults, workers + len(faults) // 3, f"{2 * shards}:{workers}")
        found[replicas] = {}
        for note in notes(folder, "step"):
            if note["replica"] is not None:
                found[replicas].setdefault(note["step"], set()).add((note["loss"], note["norm"]))
    assert all(len(values) == 1 for steps in found.values() for values in steps.values())
    assert len(found[1]) == 12 and all(found[2][step] == values for step, values in found[1].items())


@pytest.mark.chaos
@pytest.mark.parametrize(("shards", "replicas", "victim"), [(2, 1, None), (1, 2, 3)])
def test_a_script_for_lightnings_strategy(tmp_path: Path, shards: int, replicas: int, victim: int | None) -> None:
    """Without failures, and with a death: the same parameters, and a checkpoint that Lightning's strategy resumes."""
    settings = {"shards": shards, "replicas": replicas, "slices": 2}
    if victim is not None:
        (tmp_path / "kill").write_text(str(victim))
    agents = 4 if victim is None else 5
    with Cluster(tmp_path, script=SCRIPT, agents=agents, nodes="4:4", settings=settings) as cluster:
        cluster.wait_end(200)
        assert len(cluster.events("worker_died")) == (victim is not None)
        assert not cluster.events("task_restarts")
    assert not (tmp_path / "kill").exists()
    export_checkpoint(tmp_path / "ours.ckpt", tmp_path / "whole.ckpt")
    variables = {name: value for name, value in os.environ.items() if not name.startswith("UNICRON_")}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    done = subprocess.run(
        [*command, str(SCRIPT), str(tmp_path), "plain"], env=variables, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    own, theirs, again = (
        torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("whole", "plain", "again")
    )
    compare(own, theirs, 1e-11)
    compare(again, own, 0.0)
    metrics = [json.loads((tmp_path / f"{name}-0.json").read_text()) for name in ("ours", "plain")]
    assert metrics[0].keys() == metrics[1].keys()
    [state], [wanted] = again["optimizer_states"], own["optimizer_states"]
    assert state["state"].keys() == wanted["state"].keys()
    for number, values in wanted["state"].items():
        for name, value in values.items():
            torch.testing.assert_close(state["state"][number][name], value, rtol=0, atol=0)
