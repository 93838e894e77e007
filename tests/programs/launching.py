"""torchrun with one of these programs, to its end, and the results."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

PROGRAMS = Path(__file__).parent


def launch(arguments: list[str], folder: Path, seconds: float = 300, **environment: str) -> None:
    """Run torchrun to its end."""
    command = [sys.executable, "-m", "torch.distributed.run", *arguments]
    settings = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    with (folder / "torchrun.log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, env=settings, stdout=log, stderr=log)
        try:
            code = process.wait(seconds)
        finally:
            process.terminate()
            process.wait(30)
    logs = [folder / "torchrun.log", *folder.glob("*/coordinator.log")]
    assert code == 0, "\n".join(f"==== {path.name}\n{path.read_text()[-4000:]}" for path in logs)


def load(folder: Path, name: str, rank: int = 0) -> dict[str, Any]:
    """Load a rank's result of a case."""
    result: dict[str, Any] = torch.load(folder / f"{name}-{rank}.pt", weights_only=False)
    return result
