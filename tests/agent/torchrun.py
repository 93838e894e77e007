"""Real torchrun processes for tests: start, watch, signal, and clean up."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import psutil

T = TypeVar("T")
HERE = Path(__file__).parent


def _whole_lines(path: Path) -> list[str]:
    """Return all lines but a last one that is still being written."""
    return path.read_text().rpartition("\n")[0].splitlines()


def until(what: str, probe: Callable[[], T | None], seconds: float = 60.0) -> T:
    """Wait until ``probe`` returns a true value."""
    deadline = time.monotonic() + seconds
    while not (found := probe()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.01)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Cluster:
    """Agents of one task on this machine and their embedded coordinator, in a folder of their own."""

    def __init__(self, folder: Path, script: str, nodes: str, per_node: int = 1, conf: str = "") -> None:
        self.folder = folder
        self.script = script
        self.nodes = nodes
        self.per_node = per_node
        self.conf = conf
        self.port = free_port()
        self.agents: list[subprocess.Popen[bytes]] = []
        self.state_dir = folder / "state"

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for log in sorted(self.folder.glob("agent-*.log")) + sorted(self.state_dir.glob("*.log")):
                print(f"==== {log.name}\n{log.read_text()[-6000:]}")
            if (self.folder / "events.jsonl").exists():
                print((self.folder / "events.jsonl").read_text()[-6000:])
        for agent in self.agents:
            children = psutil.Process(agent.pid).children(recursive=True) if agent.poll() is None else []
            for child in children:
                child.kill()
            agent.kill()
            agent.wait()
        coordinator = self.coordinator()
        if coordinator is not None:
            coordinator.kill()
            until("the coordinator's end", lambda: not coordinator.is_running() or coordinator.status() == "zombie")

    def start(self, *, endpoint: str | None = None, nodes: str | None = None, **environment: str) -> int:
        """Start an agent; return its place in `agents`."""
        place = len(self.agents)
        conf = ",".join(filter(None, [self.conf, f"node=n{place},state_dir={self.state_dir}"]))
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "unicron"),
            *("--rdzv-endpoint", endpoint or f"127.0.0.1:{self.port}", "--rdzv-id", "task", "--rdzv-conf", conf),
            *("--nnodes", nodes or self.nodes, "--nproc-per-node", str(self.per_node), "--max-restarts", "100"),
            *(str(HERE / self.script), str(self.folder)),
        ]
        with (self.folder / f"agent-{place}.log").open("wb") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
            self.agents.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        return place

    def log(self, place: int) -> str:
        return (self.folder / f"agent-{place}.log").read_text()

    def events(self, what: str, **fields: Any) -> list[dict[str, Any]]:
        """Notes of the workers, oldest first."""
        path = self.folder / "events.jsonl"
        lines = [json.loads(line) for line in _whole_lines(path)] if path.exists() else []
        return [line for line in lines if line["what"] == what and fields.items() <= line.items()]

    def wait_events(self, count: int, what: str, seconds: float = 60.0, **fields: Any) -> list[dict[str, Any]]:
        return until(
            f"{count} x {what} {fields}",
            lambda: found if len(found := self.events(what, **fields)) >= count else None,
            seconds,
        )

    def finish(self) -> list[int]:
        """Let the workers end and return the agents' exit statuses."""
        (self.folder / "finish").touch()
        return [agent.wait(60) for agent in self.agents]

    def coordinator(self) -> psutil.Process | None:
        """Return the embedded coordinator, if it runs."""
        for process in psutil.process_iter(["cmdline"]):
            command = " ".join(process.info["cmdline"] or [])
            if "unicron_lightning.coordinator" in command and f"coordinator.port={self.port}" in command:
                return process if process.status() != "zombie" else None
        return None


def workers_of(agent: int) -> list[psutil.Process]:
    """Return the worker processes of an agent."""
    children = psutil.Process(agent).children()
    return [child for child in children if "_worker.py" in " ".join(_command_line(child))]


def _command_line(process: psutil.Process) -> list[str]:
    """Return a process's command line; empty if it ended meanwhile, e.g. a killed coordinator that is not
    reaped yet.
    """
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    os.kill(pid, number)
