"""torchrun with one of these programs, to its end, and the results."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import torch
from worlds.torchruns import start_torchrun

from unicron_lightning.local_cluster.processes import free_port

PROGRAMS = Path(__file__).parent
REFERENCE_SECONDS = 240
"""Limit of a reference: it takes about 30 s alone on two cores, and 130 s beside four others."""


def launch(arguments: list[str], folder: Path, seconds: float = 300, **environment: str) -> None:
    """Run torchrun to its end. One that hangs fails with the stacks of its workers."""
    status = _run(arguments, folder, seconds, environment)
    logs = [folder / "torchrun.log", *folder.glob("*/coordinator.log")]
    assert status == 0, "\n".join([f"status {status}", *(f"==== {path.name}\n{_end(path)}" for path in logs)])


def launch_reference(program: str, folder: Path, cases: Iterable[str], out: Path) -> None:
    """Run a program's cases under ddp in two processes.

    Nothing of this project runs there. One such run has hung, and 62 tests failed for it. A second one is therefore
    started in place of the first one that hangs, whose stacks are in ``hung.log``.
    """
    port = ["--nproc-per-node", "2", "--master-port", str(free_port())]
    arguments = [*port, str(PROGRAMS / program), "ddp", str(out), *cases]
    if _run(arguments, folder, REFERENCE_SECONDS, {}) is None:
        print(f"the reference hung, another is started: see {folder / 'hung.log'}", file=sys.__stderr__)
        (folder / "torchrun.log").rename(folder / "hung.log")
        shutil.rmtree(out, ignore_errors=True)  # its checkpoints would make the names of others differ
        launch(arguments, folder, REFERENCE_SECONDS)


def load(folder: Path, name: str, rank: int = 0) -> dict[str, Any]:
    """Load a rank's result of a case."""
    result: dict[str, Any] = torch.load(folder / f"{name}-{rank}.pt", weights_only=False)
    return result


def _run(arguments: list[str], folder: Path, seconds: float, environment: dict[str, str]) -> int | None:
    """Run torchrun; None if it has not ended in time, after the stacks of all its processes were written to its log."""
    settings = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"} | environment
    with (folder / "torchrun.log").open("w") as log:
        process = start_torchrun(arguments, settings, folder, log)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _abort(process)


def _abort(torchrun: subprocess.Popen[bytes]) -> None:
    """End torchrun and its workers by SIGABRT, on which Python writes their stacks."""
    children = []
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(torchrun.pid).children(recursive=True) if torchrun.poll() is None else []
    for process in reversed(children):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGABRT)
    psutil.wait_procs(children, 10)
    if torchrun.poll() is None:
        torchrun.terminate()
    torchrun.wait(60)


def _end(path: Path) -> str:
    return path.read_text(errors="replace")[-8000:]
