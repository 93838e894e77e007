"""Runs cases of the matrix, many in each process, under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from unicron_lightning.local_cluster.processes import free_port

SCRIPT = Path(__file__).with_name("train.py")


def run(strategy: str, workers: int, names: Sequence[str], folder: Path, seconds: float = 540) -> int:
    """Trains the cases in a world of so many workers; the exit status. Records are in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    back_end = "c10d" if strategy.startswith("ddp") else "unicron"
    nodes = ["--nnodes", "1:1", "--nproc-per-node", str(workers), "--max-restarts", "0"]
    meeting = ["--rdzv-backend", back_end, "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "matrix"]
    command = [sys.executable, "-m", "torch.distributed.run", *nodes, *meeting, str(SCRIPT), strategy, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "UNICRON_STATE_DIR": str(folder / "state")}
    with (folder / "torchrun.log").open("w") as log:
        process = subprocess.Popen([*command, *names], cwd=folder, env=environment, stdout=log, stderr=log)
        try:
            return process.wait(seconds)
        finally:
            process.terminate()
            process.wait(60)
