"""Runs cases of the matrix under torchrun: many in each process, or one with a kill."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from matrix.features import Case
from matrix.killing import Kill
from system.cluster import Cluster
from worlds.torchruns import start_torchrun

from unicron_lightning.local_cluster.processes import free_port

SCRIPT = Path(__file__).with_name("train.py")
TESTS = SCRIPT.parents[1]
LOADER_SOCKETS = "pymp-*/listener-*"
"""Sockets through which a `DataLoader`'s workers pass tensors: Python removes them at an ordinary end only."""


def path() -> str:
    """PYTHONPATH with the folder of the tests."""
    return os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))


def run(strategy: str, workers: int, cases: Mapping[str, Case], folder: Path, seconds: float = 540) -> int:
    """Trains the cases in a world of so many workers; the exit status. Records are in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.json").write_text(json.dumps({"strategy": strategy, "cases": cases}))
    back_end = "c10d" if strategy == "ddp" else "unicron"
    nodes = ["--nnodes", "1:1", "--nproc-per-node", str(workers), "--max-restarts", "0"]
    meeting = ["--rdzv-backend", back_end, "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "matrix"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path()}
    environment["UNICRON_STATE_DIR"] = str(folder / "state")
    with (folder / f"torchrun-{next(iter(cases))}.log").open("w") as log:
        process = start_torchrun([*nodes, *meeting, str(SCRIPT), str(folder)], environment, folder, log)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return -1
        finally:
            process.terminate()
            process.wait(60)


def run_killed(name: str, case: Case, kill: Kill, folder: Path, seconds: float = 240) -> int:
    """Train a case in a world of two, with one worker killed and replaced; 0 if all agents have ended well."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"strategy": "unicron", "cases": {name: case}, "kill": kill.plain()}
    variables = {"PYTHONPATH": path()}
    cluster = Cluster(
        folder,
        agents=2,
        nodes="2:2",
        script=SCRIPT,
        settings=settings,
        variables=lambda node: variables,
        leaves=LOADER_SOCKETS if case["loader"] == "workers" else None,
    )
    try:
        with cluster:
            cluster.wait_end(seconds)
    except AssertionError as error:
        print(f"{name}: {error}")
        return 1
    return 0
