"""The examples and the documented cluster run as described, with real torchrun agents."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from unicron_lightning import LocalCluster

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]


def test_the_gpt_learns(tmp_path: Path) -> None:
    with LocalCluster(
        [ROOT / "examples/gpt.py", "--steps", "40", "--nodes", "2"], nodes=2, nnodes="2:2", folder=tmp_path
    ) as cluster:
        assert cluster.wait_exit() == {"node0": 0, "node1": 0}
        (loss,) = re.findall(r"finished 40 steps: loss ([\d.]+)", cluster.log("node0") + cluster.log("node1"))
    assert float(loss) < 5.0, "a uniform guess has 5.5"


def test_the_sharded_gpt_learns(tmp_path: Path) -> None:
    command = [ROOT / "examples/fsdp_gpt.py", "--steps", "40", "--replicas", "1", "--folder", tmp_path]
    with LocalCluster(command, nodes=2, nnodes="2:2", folder=tmp_path) as cluster:
        assert cluster.wait_exit() == {"node0": 0, "node1": 0}
        (loss,) = re.findall(r"finished 40 steps: loss ([\d.]+)", cluster.log("node0") + cluster.log("node1"))
    assert float(loss) < 5.0, "a uniform guess has 5.5"
    assert (tmp_path / "last.ckpt").exists()


def test_the_classifier_learns_and_keeps_its_best_checkpoint(tmp_path: Path) -> None:
    command = [ROOT / "examples/images.py", "--folder", tmp_path / "best", "--epochs", "2", "--images", "512"]
    with LocalCluster(command, nodes=2, nnodes="2:2", folder=tmp_path) as cluster:
        assert cluster.wait_exit() == {"node0": 0, "node1": 0}
        (accuracy,) = re.findall(r"accuracy ([\d.]+)\n", cluster.log("node0") + cluster.log("node1"))
    assert float(accuracy) > 0.4, "a guess has 0.25"
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["best.ckpt"]


def test_the_sweep_runs_its_jobs_on_a_cluster_of_its_own(tmp_path: Path) -> None:
    words = ["--multirun", "degree=1,3", "steps=50", "hydra/launcher=unicron", "hydra.launcher.poll_seconds=0.2"]
    words += ["hydra.launcher.endpoint=127.0.0.1:1", "hydra.sweep.dir=sweep"]
    command = [sys.executable, str(ROOT / "examples/sweep.py"), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    logs = [path.read_text() for path in sorted((tmp_path / "sweep/.unicron/logs").rglob("rank0.log"))]
    losses = [float(loss) for log in logs for loss in re.findall(r"validation loss ([\d.]+)", log)]
    assert len(losses) == 2 and losses[0] != losses[1]


@pytest.mark.chaos  # two workers import megatron-core: 20 s of CPU; run it with -m chaos
def test_the_ported_pretraining_learns_with_sequence_parallelism(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core.package_info")
    script = ROOT / "examples/porting/pretrain_gpt.py"
    command = [script, "--devices", "2", "--tensor", "2", "--sequence-parallel", "--steps", "12"]
    with LocalCluster(command, nodes=2, nnodes="2:2", folder=tmp_path) as cluster:
        assert cluster.wait_exit() == {"node0": 0, "node1": 0}
        (loss,) = re.findall(r"lm loss ([\d.]+) after 12 steps", cluster.log("node0") + cluster.log("node1"))
    assert float(loss) < 4.7, "a uniform guess has 4.85"


@pytest.mark.parametrize("place", [0, 1])
def test_the_documented_clusters_run(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs/local-cluster.md").read_text()
    block = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[place]
    monkeypatch.chdir(ROOT)
    exec(compile(block, "docs/local-cluster.md", "exec"), {})
