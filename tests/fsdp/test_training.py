"""A sharded GPT with workers killed at every kind of place: parameters as those of a run in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp.judge import SCRIPT, alone, between_replicas, differences, notes
from fsdp.train import SETTINGS, Model
from system.cluster import Cluster

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

TOLERANCE = 1e-10


def die(point: str, replica: int, shard: int, **where: Any) -> dict[str, Any]:
    return {"point": point, "replica": replica, "shard": shard, **where}


def run(folder: Path, settings: dict[str, Any], schedule: list[dict[str, Any]], agents: int, nodes: str) -> None:
    with Cluster(folder, script=SCRIPT, agents=agents, nodes=nodes, schedule=schedule, settings=settings) as cluster:
        cluster.wait_end(500)
        names = [event["name"] for event in cluster.events()]
    assert "task_restarts" not in names


def check(folder: Path, settings: dict[str, Any], workers: int) -> dict[str, Any]:
    """Compare parameters and metrics at the end with those of a run in one process; return the reference."""
    [steps] = {note["step"] for note in notes(folder, "end")}
    reference = alone(folder / "alone", {**settings, "steps": steps})
    found = differences(folder, reference, 2)
    assert len(found) == workers and max(found.values()) < TOLERANCE, found
    assert not between_replicas(folder)
    expected = {note["step"]: note for note in notes(folder / "alone", "validated")}
    passes = [
        note for note in notes(folder, "validated") if note["step"] in expected
    ]  # one more may follow the last step
    assert {note["step"] for note in passes} == expected.keys()
    for name in ("val_loss", "val_samples"):
        assert all(abs(note[name] - expected[note["step"]][name]) < 1e-9 for note in passes)
    own = torch.load(folder / "final-0-0.pt", weights_only=True)["metrics"]
    assert abs(own["loss_epoch"] - reference["metrics"]["loss_epoch"]) < 1e-9
    return reference


def test_an_undisturbed_run_equals_one_process(tmp_path: Path) -> None:
    settings = {"steps": 8, "full": 4, "validate": 3, "configures": False}
    run(tmp_path, settings, [], 4, "4:4")
    check(tmp_path, settings, 4)


def test_kills_heal(tmp_path: Path) -> None:
    schedule = [
        die("forward", 0, 1),
        die("validation", 1, 0),
        die("reduce", 1, 1),
        die("commit", 0, 0),
    ]
    settings = {"steps": 12, "full": 4, "validate": 5, "dropout": 0.0}
    run(tmp_path, settings, schedule, 5, "2:4")
    struck = [note["point"] for note in notes(tmp_path, "fault")]
    assert struck == [fault["point"] for fault in schedule]
    check(tmp_path, settings, 4)


def test_compiled_blocks_and_gradients_clipped_by_value(tmp_path: Path) -> None:
    schedule = [die("backward", 1, 0), die("reduce-scatter", 0, 1)]
    settings = {"steps": 8, "full": 4, "compile": "aot_eager", "clips": "value", "clip": 1e-3}
    run(tmp_path, settings, schedule, 5, "2:4")
    assert [note["point"] for note in notes(tmp_path, "fault")] == ["backward", "reduce-scatter"]
    check(tmp_path, settings, 4)


def test_checkpoints_have_whole_tensors_and_resume_with_another_number_of_shards(tmp_path: Path) -> None:
    settings = {"steps": 6, "full": 2, "shards": 2, "replicas": 1, "save_every": 4}
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    run(tmp_path / "first", settings, [], 2, "2:2")
    [path] = (tmp_path / "first" / "checkpoints").iterdir()
    saved = torch.load(path, weights_only=True)
    module = Model({**SETTINGS, **settings})
    module.load_state_dict(saved["state_dict"])
    [optimizer] = saved["optimizer_states"]
    shapes = [parameter.shape for parameter in module.parameters()]
    assert [optimizer["state"][index]["exp_avg"].shape for index in range(len(shapes))] == shapes
    run(tmp_path / "second", {**settings, "resume": str(path), "shards": 1, "replicas": 2}, [], 2, "2:2")
    reference = torch.load(tmp_path / "second" / "final-1-0.pt", weights_only=True)
    found = differences(tmp_path / "first", reference, 2)
    assert len(found) == 2 and max(found.values()) < TOLERANCE, found
