"""The examples and the documented cluster run as described, with real torchrun agents."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from unicron_lightning import LocalCluster

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]
USES = ["3360 samples 0 times, 1440 samples 1 times"]


@pytest.mark.chaos  # to keep `make test` short: the sharded one below learns, too
def test_the_gpt_learns(tmp_path: Path) -> None:
    with LocalCluster(
        [ROOT / "examples/gpt.py", "--steps", "40", "--nodes", "2"], nodes=2, nnodes="2:2", folder=tmp_path
    ) as cluster:
        assert cluster.wait_exit() == {"node0": 0, "node1": 0}
        (loss,) = re.findall(r"finished 40 steps: loss ([\d.]+)", cluster.log("node0") + cluster.log("node1"))
    assert float(loss) < 5.0, "a uniform guess has 5.5"


@pytest.mark.chaos
def test_the_sharded_gpt_learns(tmp_path: Path) -> None:
    command = [ROOT / "examples/fsdp_gpt.py", "--steps", "40", "--replicas", "1", "--folder", tmp_path]
    with LocalCluster(command, nodes=2, nnodes="2:2", folder=tmp_path) as cluster:
        assert cluster.wait_exit() == {"node0": 0, "node1": 0}
        (loss,) = re.findall(r"finished 40 steps: loss ([\d.]+)", cluster.log("node0") + cluster.log("node1"))
    assert float(loss) < 5.0, "a uniform guess has 5.5"
    assert (tmp_path / "last.ckpt").exists()


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("example", "uses"),
    [("loop_gpt", USES), ("loop_shards", USES), ("loop_gan", [])],
)
def test_the_demonstration_of_a_loop_shows_that_a_kill_changes_nothing(example: str, uses: list[str]) -> None:
    command = [sys.executable, ROOT / f"examples/{example}.py", "--demo", "--steps", "60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^killed a worker after step [1-5]\d$", done.stdout, re.MULTILINE)) == 1
    struck, calm = re.findall(r"^finished 60 steps: loss ([\d.]+)", done.stdout, re.MULTILINE)
    assert struck == calm and float(calm) < 5.0, "a uniform guess of a byte has 5.5"
    (difference,) = re.findall(r"^largest difference of a parameter: (\S+)$", done.stdout, re.MULTILINE)
    assert float(difference) < 1e-9
    assert re.findall(r"^uses with the failure: (.*)$", done.stdout, re.MULTILINE) == uses


@pytest.mark.parametrize("example", ["loop_gpt", "loop_gan"])
def test_the_script_before_has_the_same_parameters(example: str, tmp_path: Path) -> None:
    models = []
    for name in (f"{example}_before", example):
        command = [sys.executable, ROOT / f"examples/{name}.py", "--steps", "2", "--folder", tmp_path]
        subprocess.run(command, check=True, capture_output=True, timeout=100)
        saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
        models.append({key: [*saved[key]] for key in saved if key != "unicron_loop"})
    assert models[0] == models[1]


def test_the_classifier_learns_and_keeps_its_best_checkpoint(tmp_path: Path) -> None:
    command = [ROOT / "examples/images.py", "--folder", tmp_path / "best", "--epochs", "2", "--images", "512"]
    with LocalCluster(command, nodes=2, nnodes="2:2", folder=tmp_path) as cluster:
        assert cluster.wait_exit() == {"node0": 0, "node1": 0}
        (accuracy,) = re.findall(r"accuracy ([\d.]+)\n", cluster.log("node0") + cluster.log("node1"))
    assert float(accuracy) > 0.4, "a guess has 0.25"
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["best.ckpt"]


@pytest.mark.chaos  # to keep `make test` short: its command is started by test_commands
def test_the_sweep_runs_its_jobs_on_a_cluster_of_its_own(tmp_path: Path) -> None:
    words = ["--multirun", "degree=1,3", "steps=50", "hydra/launcher=unicron", "hydra.launcher.poll_seconds=0.2"]
    words += ["hydra.launcher.endpoint=127.0.0.1:1", "hydra.sweep.dir=sweep"]
    command = [sys.executable, str(ROOT / "examples/sweep.py"), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    logs = [path.read_text() for path in sorted((tmp_path / "sweep/.unicron/logs").rglob("rank0.log"))]
    losses = [float(loss) for log in logs for loss in re.findall(r"validation loss ([\d.]+)", log)]
    assert len(losses) == 2 and losses[0] != losses[1]


@pytest.mark.chaos  # eight workers import megatron-core: over a minute; run it with -m chaos
def test_the_ported_pretraining_with_sequence_parallelism_survives_a_kill_exactly(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core.package_info")
    program = ROOT / "tests/programs/ported.py"
    written: dict[str, list[dict[str, torch.Tensor]]] = {"shard0": [], "shard1": []}
    for name in ("whole", "killed"):
        (folder := tmp_path / name).mkdir()
        command = [program, folder, "--devices", "4", "--tensor", "2", "--sequence-parallel", "--steps", "30"]
        with LocalCluster(command, nodes=4, nnodes="2:4") as cluster:
            cluster.wait_workers(4)
            if name == "killed":
                cluster.wait_step(3)
                cluster.kill_worker("node1")
                assert cluster.until("a death", lambda: cluster.events("worker_died"))
            assert set(cluster.wait_exit().values()) == {0}
            assert not cluster.events("task_restarts")
            output = "".join(cluster.log(node) for node in cluster.agents)
        (loss,) = re.findall(r"lm loss ([\d.]+) after 30 steps", output)
        assert float(loss) < 4.7, "a uniform guess has 4.85"
        for path in sorted(folder.glob("*.pt")):
            written[path.name[:6]].append(torch.load(path, weights_only=True))
    for shards in written.values():
        assert len(shards) >= 3, "of both replicas, and of at least one after the kill"
        for other in shards[1:]:
            assert shards[0].keys() == other.keys()
            assert all(torch.equal(value, other[name]) for name, value in shards[0].items())


@pytest.mark.parametrize("place", [0, pytest.param(1, marks=pytest.mark.chaos)])
def test_the_documented_clusters_run(place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their scripts are stopped while they train, and so write a checkpoint in the working folder."""
    text = (ROOT / "docs/faults.md").read_text()
    block = re.findall(r"```python\n(from unicron_lightning import LocalCluster\n.*?)```", text, re.DOTALL)[place]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "docs/faults.md", "exec"), {})
