"""A task that ends on all its nodes, or by ``unicron cancel --save``, writes a checkpoint first: nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from system.cluster import Cluster
from system.judge import Reference, check_exact

from unicron_lightning.local_cluster.processes import free_port

pytestmark = [pytest.mark.faults, pytest.mark.timeout(420)]

SETTINGS: dict[str, Any] = {"pace": 0.05, "epochs": 5}
TRAIN = """
import time
import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel

class Slow(BoringModel):
    def training_step(self, batch, batch_idx):
        print(f"step {self.global_step} begins", flush=True)
        time.sleep(0.1)
        return super().training_step(batch, batch_idx)

quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False, "enable_progress_bar": False}
pl.Trainer(strategy="unicron", accelerator="cpu", devices=1, max_epochs=-1, limit_val_batches=0, **quiet).fit(Slow())
"""


def ended(cluster: Cluster, seconds: float) -> set[int]:
    """Wait for the agents' end; return their exit statuses."""
    agents = cluster.agents.values()
    cluster.watch(lambda: all(agent.poll() is not None for agent in agents), "the agents' end", seconds, stalled=60)
    return {agent.returncode for agent in agents}


def check_saved(cluster: Cluster) -> Path:
    """All finished steps are in one checkpoint, and each micro-batch was computed once; return its path."""
    (path,) = (cluster.folder / "checkpoints").glob("last-pause-step=*.ckpt")
    steps = {line["step"] for line in cluster.notes("step")}
    assert torch.load(path, weights_only=True)["global_step"] == len(steps) == max(steps) + 1
    computed = [(line["step"], *line["ids"]) for line in cluster.notes("computed")]
    assert len(computed) == len(set(computed)), "nothing was computed again"
    assert str(path) in {event["path"] for event in cluster.events("checkpoint_saved")}
    return path


def check_resumed(folder: Path, path: Path, reference: Reference) -> None:
    """Other nodes continue from the checkpoint, with the parameters of a failure-free run."""
    with Cluster(folder, agents=2, nodes="1:2", settings={**SETTINGS, "full": 2, "resume": str(path)}) as cluster:
        cluster.wait_end()
        check_exact(folder, reference, workers=2)


@pytest.mark.parametrize("nodes", [pytest.param("1:3", marks=pytest.mark.chaos), "3:3"])
def test_sigterm_of_all_nodes(tmp_path: Path, reference: Reference, nodes: str) -> None:
    with Cluster(tmp_path, nodes=nodes, settings=SETTINGS) as cluster:
        cluster.wait_world(3)
        for agent in cluster.agents.values():
            agent.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        codes = ended(cluster, 30)
        assert 128 + signal.SIGTERM in codes and codes <= {0, 128 + signal.SIGTERM}, "the task has not ended"
        path = check_saved(cluster)
    check_resumed(tmp_path, path, reference)


def test_a_version_that_is_complete_after_the_errors_of_all_workers_is_resumed(tmp_path: Path) -> None:
    script = Path(__file__).with_name("raising.py")
    with Cluster(tmp_path, agents=2, nodes="2:2", script=script) as cluster:
        assert cluster.wait_exit(240) == dict.fromkeys(cluster.agents, 0)
        assert len(cluster.events("task_restarts")) == 1
    assert {path.read_text() for path in tmp_path.glob("first-*")} == {"6"}


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.chaos)])
def test_ctrl_c_names_the_saved_state_in_the_terminal_and_in_jobs(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    own = {"UNICRON_ENDPOINT": f"127.0.0.1:{free_port()}", "UNICRON_STATE_DIR": str(tmp_path / "state")}
    common = {"cwd": tmp_path, "env": {**os.environ, **own}, "text": True}
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # shells ignore it in background
    program = ["-c", f"{heard}; from unicron_lightning.cli import main; main()"]
    command = [sys.executable, *program, "run", "train.py", "--workers", "1"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **common)
    assert run.stdout is not None
    printed = next(line for line in run.stdout if "step 3 begins" in line)
    run.send_signal(number)
    printed += run.communicate(timeout=60)[0]
    assert run.returncode == 128 + number
    (path,) = tmp_path.glob("checkpoints/last-pause-step=*.ckpt")
    saved = f" is saved in {path}; to resume"
    assert saved in printed
    jobs = subprocess.run([sys.executable, *program, "jobs", "--json"], capture_output=True, check=True, **common)
    (job,) = json.loads(jobs.stdout)
    assert job["state"] == "cancelled" and saved in job["reason"]


def test_cancel_saves(tmp_path: Path, reference: Reference) -> None:
    with Cluster(tmp_path, settings=SETTINGS) as cluster:
        cluster.wait_world(3)
        cluster.order("cancel", "task", "--save")
        assert 0 not in ended(cluster, 30)
        path = check_saved(cluster)
        (over,) = cluster.events("task_over")
        assert over["reason"].startswith("cancelled; step ") and f" is saved in {path}; " in over["reason"]
        assert any(f" is saved in {path}; " in cluster.log(name) for name in cluster.agents)
    check_resumed(tmp_path, path, reference)
