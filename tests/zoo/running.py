"""Runs a case under ddp, in a world of one, and with a worker that is killed, and compares the parameters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from system.cluster import Cluster

from unicron_lightning.local_cluster.processes import free_port

SCRIPT = Path(__file__).with_name("train.py")
PATH = {"PYTHONPATH": os.pathsep.join(filter(None, [str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH")]))}


def train_plainly(folder: Path, case: dict[str, Any], strategy: str, workers: int) -> list[dict[str, Any]]:
    """Train without failures; return the results by rank."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.json").write_text(json.dumps({**case, "strategy": strategy, "kill": None}))
    back_end = "c10d" if strategy == "ddp" else "unicron"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:1", "--nproc-per-node", str(workers)]
    command += ["--rdzv-backend", back_end, "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "zoo"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "UNICRON_STATE_DIR": str(folder / "state"), **PATH}
    with (folder / "log").open("w") as log:
        command += ["--max-restarts", "0", str(SCRIPT), str(folder)]
        status = subprocess.run(command, cwd=folder, env=variables, stdout=log, stderr=log, timeout=240).returncode
    assert status == 0, (folder / "log").read_text()[-3000:]
    return _results(folder)


def train_killed(folder: Path, case: dict[str, Any], kill: Sequence[Any]) -> list[dict[str, Any]]:
    """Train with one worker killed; ``kill`` has the last arguments of `zoo.train.Killed`."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {**case, "strategy": case.get("strategy", "unicron"), "kill": kill}
    workers = case.get("workers", 2)
    agents: dict[str, Any] = {"agents": workers, "nodes": f"{workers}:{workers}", "variables": lambda node: PATH}
    with Cluster(folder, script=SCRIPT, settings=settings, **agents) as task:
        task.wait_end(240)
    assert (folder / "killed").exists(), "no worker was killed"
    return _results(folder)


def difference(mine: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Return the largest difference of parameters; running statistics of batch norm differ from ddp's on purpose."""
    assert mine["state"].keys() == theirs["state"].keys() and mine["steps"] == theirs["steps"]
    pairs = [(value, theirs["state"][name]) for name, value in mine["state"].items() if "running_" not in name]
    return max(float((one.double() - other.double()).abs().max()) for one, other in pairs if one.is_floating_point())


def _results(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(path, weights_only=False) for path in sorted(folder.glob("result-*.pt"))]
