"""Three torchrun agents on this machine, with methods to kill them."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from unicron_lightning.cli.client import fetch
from unicron_lightning.demo.diary import Diary, Line
from unicron_lightning.errors import CoordinatorUnavailable


class Cluster:
    """Agents of one task with an embedded coordinator. A context manager that leaves no process behind.

    Args:
        out: folder for logs, diaries and results.
        nodes: number of agents.
        arguments: of the training script.
    """

    def __init__(self, out: Path, nodes: int, arguments: Sequence[str] = ()) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out = out
        self._arguments = [*arguments, "--out", str(out), "--nodes", str(nodes)]
        self._port = free_port()
        self._agents: dict[int, subprocess.Popen[bytes]] = {}
        self._diary = Diary(out)
        for node in range(nodes):
            self.start_agent(node)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self._agents.values():
            if agent.poll() is None:
                agent.terminate()
        for agent in self._agents.values():
            try:
                agent.wait(20)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()

    @property
    def diary(self) -> list[Line]:
        """Lines of all workers so far."""
        return self._diary.lines

    def start_agent(self, node: int) -> None:
        """Start (or restart) the node's agent, as a user would by hand."""
        command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "unicron"]
        command += ["--rdzv-endpoint", f"127.0.0.1:{self._port}", "--rdzv-id", "demo"]
        command += ["--rdzv-conf", f"node=node{node},allow_injection=true"]
        command += ["--nnodes", "1:3", "--nproc-per-node", "1", "--max-restarts", "1000"]
        command += ["-m", "unicron_lightning.demo.train", *self._arguments]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "UNICRON_STATE_DIR": str(self.out / "coordinator"),
            "PYTHONWARNINGS": "ignore",
        }
        with (self.out / f"agent-node{node}.log").open("ab") as log:
            self._agents[node] = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def wait(self, timeout: float) -> None:
        """Wait until all agents have exited.

        Raises:
            RuntimeError: an agent has failed; the message names its log.
            TimeoutError: the agents have not exited in ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while any(agent.poll() is None for agent in self._agents.values()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"training did not end within {timeout} s; logs are in {self.out}")
            self._diary.read()
            time.sleep(0.05)
        self._diary.read()
        for node, agent in self._agents.items():
            if agent.returncode:
                raise RuntimeError(f"agent {node} ended with {agent.returncode}; see {self.out}/agent-node{node}.log")

    def until(self, condition: Callable[[], dict[str, Any] | None], timeout: float = 120.0) -> dict[str, Any]:
        """Read the diaries until ``condition`` returns a line; return the line."""
        deadline = time.monotonic() + timeout
        while True:
            self._diary.read()
            line = condition()
            if line is not None:
                return line
            if time.monotonic() > deadline:
                raise TimeoutError(f"the condition did not hold within {timeout} s; logs are in {self.out}")
            time.sleep(0.001)

    def step(self) -> int:
        """Last finished step."""
        return max((line["step"] for line in self.diary if line["event"] == "step"), default=0)

    def worker(self, node: int) -> int:
        """Process of the node's present worker."""
        return int([x for x in self.diary if x["event"] == "start" and x["node"] == f"node{node}"][-1]["pid"])

    def kill_worker(self, node: int) -> float:
        """Send SIGKILL to the node's worker; return the time."""
        return self._inject(f"kill node=node{node}")

    def kill_agent(self, node: int) -> float:
        """Send SIGKILL to the node's agent, with which its worker dies; return the time."""
        at = self._inject(f"kill agent node=node{node}")
        self._agents[node].wait()
        return at

    def kill_coordinator(self) -> float:
        """Send SIGKILL to the embedded coordinator; return the time."""
        with contextlib.suppress(CoordinatorUnavailable):  # it no longer answers
            self._inject("kill coordinator")
        return self._injected_at()

    def _inject(self, fault: str) -> float:
        """Inject a fault; return the time at which it was noted, just before it struck."""
        fetch(f"127.0.0.1:{self._port}", "/v1/tasks/demo/inject", method="POST", body={"fault": fault})
        return self._injected_at()

    def _injected_at(self) -> float:
        return float([event for event in self.events() if event["name"] == "fault_injected"][-1]["at"])

    def events(self) -> list[dict[str, Any]]:
        """The task's event log, read from the coordinator's database, which also exists without a running
        coordinator.
        """
        (path,) = (self.out / "coordinator").rglob("coordinator.sqlite")
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            rows = database.execute("SELECT at, name, incident, fields FROM events ORDER BY seq").fetchall()
            return [{"at": row[0], "name": row[1], "incident": row[2], "fields": json.loads(row[3])} for row in rows]


def free_port() -> int:
    """A TCP port of the loopback address without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
