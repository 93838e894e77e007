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
REFERENCE_SECONDS = 45
"""Limit of each case of a reference, with the imports: 0.6 s alone on two cores, and 3 s beside four others."""


def launch(arguments: list[str], folder: Path, seconds: float = 300, **environment: str) -> None:
    """Run torchrun to its end. One that hangs fails with the stacks of its workers.

    Args:
        arguments: of torchrun.
        folder: where it runs, and has its log.
        seconds: limit of the whole run.
        environment: beside that of this process.
    """
    status = _run(arguments, folder, seconds, environment)
    logs = [folder / "torchrun.log", *folder.glob("*/coordinator.log")]
    assert status == 0, "\n".join([f"status {status}", *(f"==== {path.name}\n{_end(path)}" for path in logs)])


def launch_reference(program: str, folder: Path, cases: Iterable[str], out: Path) -> None:
    """Run a program's cases under ddp in two processes.

    Nothing of this project runs there. Under Python 3.11 a worker of a data loader may hang in its fork: until the
    lock of all thread states is renewed there, it waits for it, and a thread of gloo may have held it. A second run is
    therefore started in place of the first one that hangs, whose stacks are in ``hung0.log``.
    """
    for attempt in range(2):
        port = ["--nproc-per-node", "2", "--master-port", str(free_port())]
        status = _run([*port, str(PROGRAMS / program), "ddp", str(out), *cases], folder, REFERENCE_SECONDS, {}, out)
        if status is not None:
            break
        print(f"the reference hung, see {folder}/hung{attempt}.log", file=sys.__stderr__)
        (folder / "torchrun.log").rename(folder / f"hung{attempt}.log")
        shutil.rmtree(out, ignore_errors=True)  # its checkpoints would make the names of others differ
    assert status == 0, _end(next(folder.glob("torchrun.log"), folder / "hung1.log"))


def load(folder: Path, name: str, rank: int = 0) -> dict[str, Any]:
    """Load a rank's result of a case."""
    result: dict[str, Any] = torch.load(folder / f"{name}-{rank}.pt", weights_only=False)
    return result


def _run(
    arguments: list[str], folder: Path, seconds: float, environment: dict[str, str], results: Path | None = None
) -> int | None:
    """Run torchrun; None if it has not ended in time, after the stacks of all its processes were written to its log.

    With a folder of results each new one has the time for itself.
    """
    settings = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"} | environment
    with (folder / "torchrun.log").open("w") as log:
        process, known = start_torchrun(arguments, settings, folder, log), -1
        try:
            while known != (known := len([*results.glob("*.pt")]) if results else 0):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(seconds)
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
