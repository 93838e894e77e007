"""Runs the acceptance kit's ranks, several on one GPU, and collects their measurements."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

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


def environment(host: str) -> dict[str, str]:
    """Return the variables of a rank or an agent that is to be taken for a host of this name."""
    values = {**os.environ, **ONE_GPU, "NCCL_HOSTID": host}
    values.pop("CUBLAS_WORKSPACE_CONFIG", None)
    handler.settle(values)
    return values


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
    processes = []
    for rank in range(world):
        values = {**environment(f"rank{rank}"), **(extra or {})}
        if not settled:
            for name in handler.REQUIRED:
                values.pop(name, None)
        command = [sys.executable, str(PROGRAM), case, str(rank), str(world), str(store.port), on]
        processes.append(subprocess.Popen(command, env=values, stdout=subprocess.PIPE, text=True))
    try:
        outputs = [process.communicate(timeout=seconds)[0] for process in processes[: world - lost]]
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
    return [measured_in(output) for output in outputs]


def measured_in(output: str) -> dict[str, Any]:
    """Return what a rank measured from its output, which may contain warnings of NCCL."""
    lines = [line for line in output.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {}


def versions() -> dict[str, str]:
    """Return the versions that the report names."""
    found = {"python": sys.version.split()[0], "torch": torch.__version__}
    if device() == "cuda":
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["cuda"] = str(torch.version.cuda)
        found["gpu"] = torch.cuda.get_device_name(0)
    return found
