"""Runs the acceptance kit's ranks, several on one GPU, and collects their measurements."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from worlds import torchruns

from unicron_lightning.agent import handler

PROGRAM: Final = Path(__file__).with_name("ranks.py")
REHEARSAL: Final = "UNICRON_KIT_REHEARSAL"
"""Set to 1: run on the CPU over gloo what can be run there, to try the kit itself."""

ONE_GPU: Final[dict[str, str]] = json.loads(
    (Path(__file__).parents[2] / "benchmarks" / "one_gpu.json").read_text(encoding="utf-8")
)
"""Variables with which ranks that share a GPU use TCP on the loopback interface.

With a NCCL_HOSTID of its own for each rank, NCCL takes the ranks for ranks of several hosts.
"""


def device() -> str | None:
    """Return the device that the kit runs on, None if there is none."""
    if os.environ.get(REHEARSAL) == "1":
        return "cpu"
    return "cuda" if torch.cuda.is_available() and dist.is_nccl_available() else None


def limit() -> int:
    """Return the seconds that one test may take: on a CPU processes compute much longer."""
    return 150 if device() == "cuda" else 540


def environment(host: str) -> dict[str, str]:
    """Return the variables of a rank or an agent that is to be taken for a host of this name."""
    values = {**os.environ, **ONE_GPU, "NCCL_HOSTID": host}
    values.pop("CUBLAS_WORKSPACE_CONFIG", None)
    values["PYTHONPATH"] = _paths()
    handler.settle(values)
    return values


def _paths() -> str:
    return os.pathsep.join(filter(None, [str(PROGRAM.parents[1]), os.environ.get("PYTHONPATH")]))


_prepared: list[Path] = []
"""Socket of the process that forks ranks, of at most one."""


@contextmanager
def forking(out: Path) -> Iterator[None]:
    """Inside, ranks are forked from a process that has imported everything and never uses the device."""
    variables = {**torchruns.ENVIRONMENT, "PYTHONPATH": _paths()}
    with torchruns.prepared(out, "gpu.ranks", environment=variables) as path:
        _prepared.append(path)
        try:
            yield
        finally:
            _prepared.pop()


def _start(folder: Path, name: str, values: Mapping[str, str]) -> Any:
    with (folder / f"{name}.log").open("wb") as output:
        if _prepared:
            words = ["gpu.ranks", str(folder), name]
            return torchruns.ForkedProcess(_prepared[0], words, values, str(folder), output.fileno())
        command = [sys.executable, str(PROGRAM), str(folder), name]
        return subprocess.Popen(command, env=values, stdout=output)


def run(
    case: str,
    world: int,
    *,
    lost: int = 0,
    seconds: float = 120.0,
    store: dist.TCPStore | None = None,
    extra: Mapping[str, str] | None = None,
    settled: bool = True,
) -> list[dict[str, Any]]:
    """Run a case of `ranks` in ``world`` processes.

    Args:
        case: its name.
        world: number of ranks.
        lost: how many of the last ranks stop or die, and so measure nothing.
        seconds: limit for the whole case.
        store: in which they meet; a new one by default.
        extra: variables beside the kit's.
        settled: set the variables that the agent sets.

    Returns:
        What each rank that was not lost measured, in rank order.
    """
    on = device()
    assert on is not None
    store = store or dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as name:
        folder, processes = Path(name), []
        for rank in range(world):
            values = {**environment(f"rank{rank}"), **(extra or {})}
            if not settled:
                for variable in handler.REQUIRED:
                    values.pop(variable, None)
            request = {"case": case, "rank": rank, "world": world, "port": store.port, "device": on}
            (folder / f"{rank}.json").write_text(json.dumps(request))
            processes.append(_start(folder, str(rank), values))
        try:
            deadline = time.monotonic() + seconds
            while any(process.poll() is None for process in processes[: world - lost]):
                assert time.monotonic() < deadline, f"{case} has not ended within {seconds} s"
                time.sleep(0.02)
        finally:
            for process in processes:
                process.kill()
            while any(process.poll() is None for process in processes):
                time.sleep(0.02)
        logs = [(folder / f"{rank}.log").read_text(errors="replace") for rank in range(world - lost)]
    found = [measured_in(log) for log in logs]
    assert all(found) or not settled, logs
    return found


def measured_in(output: str) -> dict[str, Any]:
    """Return what a rank measured from its output, which may contain warnings of NCCL."""
    lines = [line for line in output.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {}


def versions() -> dict[str, str]:
    """Return the versions that the report names."""
    found = {"date": time.strftime("%Y-%m-%d"), "python": sys.version.split()[0], "torch": torch.__version__}
    if device() == "cuda":
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["cuda"] = str(torch.version.cuda)
        found["gpu"] = torch.cuda.get_device_name(0)
    return found
