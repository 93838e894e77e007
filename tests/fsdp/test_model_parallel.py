"""A script for Lightning's ModelParallelStrategy runs unchanged except for ``strategy=``, and through a death."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from system.cluster import Cluster

from unicron_lightning.fsdp.export import export_checkpoint

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).with_name("model_parallel.py")
TOLERANCE = 1e-11


def test_a_script_for_lightnings_strategy(tmp_path: Path) -> None:
    (tmp_path / "kill").touch()
    with Cluster(tmp_path, script=SCRIPT, agents=5, nodes="4:4") as cluster:
        cluster.wait_end(400)
        assert len([death for death in cluster.events("worker_died") if death["cause"] == "signal"]) == 1
        assert not cluster.events("task_restarts")
    assert not (tmp_path / "kill").exists()
    wholes = [tmp_path / "best.ckpt", tmp_path / "whole.ckpt"]
    [best] = (tmp_path / "ours").iterdir()
    for path, whole in zip((best, tmp_path / "ours.ckpt"), wholes, strict=True):
        export_checkpoint(path, whole)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("UNICRON_")}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    done = subprocess.run(
        [*command, str(SCRIPT), str(tmp_path), "plain"], env=variables, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [expected] = (tmp_path / "plain").iterdir()
    assert best.name == expected.name, "the best one of a validation"
    for own, other in zip(wholes, (expected, tmp_path / "plain.ckpt"), strict=True):
        compare(torch.load(own, weights_only=True), torch.load(other, weights_only=True), TOLERANCE)
    own = torch.load(wholes[1], weights_only=True)
    for kind in ("ours", "whole"):  # resumed under Lightning's strategy, from a folder and from a file
        again = torch.load(tmp_path / f"from-{kind}.ckpt", weights_only=True)
        compare(again, own, 0.0)
        [state], [wanted] = again["optimizer_states"], own["optimizer_states"]
        assert state["state"].keys() == wanted["state"].keys()
        for number, values in wanted["state"].items():
            for name, value in values.items():
                torch.testing.assert_close(state["state"][number][name], value, rtol=0, atol=0)


def compare(ours: dict[str, Any], plain: dict[str, Any], tolerance: float) -> None:
    assert ours["global_step"] == plain["global_step"]
    assert ours["state_dict"].keys() == plain["state_dict"].keys()
    for name, tensor in ours["state_dict"].items():
        torch.testing.assert_close(tensor, plain["state_dict"][name], rtol=0, atol=tolerance)
