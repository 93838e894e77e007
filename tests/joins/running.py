"""Runs scripts in worlds of a few workers that are forked by a prepared process, so that a joiner is there at once."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from conformance.worlds import ENVIRONMENT, HERE

from unicron_lightning.local_cluster.cluster import LocalCluster
from unicron_lightning.local_cluster.processes import Processes, until

SECONDS: Final = 100.0
"""Most time of a script, on a busy machine."""


class Site:
    """Where scripts run.

    Attributes:
        folder: of outputs.
        socket: of the prepared process.
        cluster: has the coordinator.
    """

    def __init__(self, folder: Path, socket: Path, cluster: LocalCluster) -> None:
        self.folder, self.socket, self.cluster = folder, socket, cluster

    def run(self, name: str, module: str = "joins.worker", restarts: int = 3, workers: int = 2, least: int = 2) -> Path:
        """Run a script in a task of its own, with a worker on each of some nodes; return its folder."""
        folder = self.folder / name
        folder.mkdir()
        started = Processes(folder / "agents", {**self.cluster.processes.environment, **ENVIRONMENT})
        stub = [sys.executable, "-I", "-S", str(HERE / "stub.py"), str(self.socket)]
        where = ["--rdzv-backend", "unicron", "--rdzv-endpoint", self.cluster.endpoint, "--rdzv-id", f"joins-{name}"]
        shape = ["--nnodes", f"{least}:{workers}", "--nproc-per-node", "1", "--max-restarts", str(restarts)]
        script = ["--monitor-interval", "0.02", "--no-python", *stub, module, str(folder), name]
        try:
            for place in range(workers):
                conf = f"node={name}-{place},state_dir={self.cluster.state_dir},allow_injection=false"
                started.start(f"agent{place}", [*stub, "agent", *where, "--rdzv-conf", conf, *shape, *script])
            limit = time.monotonic() + SECONDS
            while any(each.poll() is None for each in started.started.values()) and time.monotonic() < limit:
                time.sleep(0.05)
            codes = [each.poll() for each in started.started.values()]
        finally:
            started.stop(0.0)
        if set(codes) != {0}:
            for path in sorted((folder / "agents").glob("*.log")):
                print(f"==== {path.name}\n{path.read_text()[-6000:]}")
        assert set(codes) == {0}, codes
        return folder

    def log(self, name: str) -> str:
        """Return the output of a script's workers."""
        return "".join(path.read_text() for path in (self.folder / name / "agents").glob("*.log"))


@contextmanager
def site(out: Path) -> Iterator[Site]:
    """Start a coordinator and the prepared process."""
    with ExitStack() as stack:
        cluster = LocalCluster(nodes=[], coordinator=[], folder=out / "coordinator", stop_seconds=0.0)
        stack.enter_context(cluster)
        short = Path(tempfile.mkdtemp(prefix="prepared-"))  # UNIX sockets have short paths
        stack.callback(shutil.rmtree, short, ignore_errors=True)
        prepared = Processes(out / "prepared", ENVIRONMENT)
        stack.callback(prepared.stop, 0.0)
        prepared.start("prepared", [sys.executable, HERE / "prepared.py", str(os.getpid()), short / "socket"])
        until(f"the prepared process; its log is in {prepared.folder}", (short / "socket").exists)
        yield Site(out, short / "socket", cluster)


def results(folder: Path) -> list[dict[str, Any]]:
    """Return the results of a script's workers."""
    return [torch.load(path, weights_only=False) for path in sorted(folder.glob("result-*.pt"))]


def first_step(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the joiner has at its first step, and what the member has there."""
    [path] = folder.glob("joiner-*.pt")
    member = path.with_name(path.name.replace("joiner", "member"))
    return torch.load(path, weights_only=False), torch.load(member, weights_only=False)
