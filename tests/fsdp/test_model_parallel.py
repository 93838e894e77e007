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
    variables = {name: value for name, value in os.environ.items() if not name.startswith("UNICRON_")}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    done = subprocess.run(
        [*command, str(SCRIPT), str(tmp_path), "plain"], env=variables, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ours, plain = ([*(tmp_path / name).iterdir(), tmp_path / f"{name}.ckpt"] for name in ("ours", "plain"))
    assert [path.name for path in ours[:-1]] == [path.name for path in plain[:-1]], "the best one of a validation"
    for own, expected in zip(ours, plain, strict=True):
        compare(*(torch.load(path, weights_only=True) for path in (own, expected)))


def compare(ours: dict[str, Any], plain: dict[str, Any]) -> None:
    assert ours["global_step"] == plain["global_step"]
    assert ours["state_dict"].keys() == plain["state_dict"].keys()
    for name, tensor in ours["state_dict"].items():
        torch.testing.assert_close(tensor, plain["state_dict"][name], rtol=0, atol=TOLERANCE)
