"""A coordinator and nodes' daemons as real processes, and the commands of their user."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from agent.torchrun import until
from coordinator.shell import Coordinator

MAIN = "from unicron_lightning.cli import main; main()"
TESTS = Path(__file__).parents[1]


class Managed:
    """Everything is in ``folder``; cleaned up at the end, the daemons in order."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder = folder
        self.logs = folder / "logs"
        self.environment = {**os.environ, "UNICRON_TOKEN": "secret", "OMP_NUM_THREADS": "1"}
        self.coordinator = Coordinator(folder / "state", *overrides, env={"UNICRON_TOKEN": "secret"})
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Managed:
        self.coordinator.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for daemon in self.daemons.values():
            if daemon.poll() is None:
                daemon.terminate()
        for name, daemon in self.daemons.items():
            try:
                daemon.wait(60)
            except subprocess.TimeoutExpired:
                print(f"==== {name} does not end")
                daemon.kill()
                daemon.wait()
        _, output = self.coordinator.stop()
        if error is not None:
            print(f"==== coordinator\n{output[-6000:]}")
            for path in sorted(self.folder.rglob("*.log*")):
                print(f"==== {path.relative_to(self.folder)}\n{path.read_text()[-4000:]}")

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.coordinator.port}"

    def start(self, node: str, slots: str = "1") -> subprocess.Popen[bytes]:
        """Start a node's daemon."""
        options = ["--endpoint", self.endpoint, "--node", node, "--slots", slots, "--logs", str(self.logs)]
        command = [sys.executable, "-c", MAIN, "agent", *options, "--stop-seconds", "40"]
        with (self.folder / f"daemon-{node}.log").open("ab") as log:
            self.daemons[node] = subprocess.Popen(command, stdout=log, stderr=log, env=self.environment)
        return self.daemons[node]

    def unicron(self, *words: str, status: int = 0) -> str:
        """Run a command; return its output."""
        return unicron(*words, "--endpoint", self.endpoint, status=status, environment=self.environment)

    def submit(self, name: str, script: str, **fields: Any) -> None:
        """Submit a job that runs one of the test workers."""
        file = self.folder / f"{name}.yaml"
        file.write_text(json.dumps({"command": [str(TESTS / script), str(self.folder)], **fields}))
        assert self.unicron("submit", str(file)) in (f"{name}: queued\n", f"{name}: running\n")

    def jobs(self) -> dict[str, str]:
        """Return the state of all jobs."""
        return {job["name"]: job["state"] for job in json.loads(self.unicron("jobs", "--json"))}

    def wait_job(self, name: str, state: str) -> None:
        """Wait until a job is in a state."""
        until(f"{name} {state}", lambda: self.jobs().get(name) == state, 60)

    def events(self, what: str, **fields: Any) -> list[dict[str, Any]]:
        """Notes of the workers, oldest first."""
        path = self.folder / "events.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [line for line in lines if line["what"] == what and fields.items() <= line.items()]

    def wait_events(self, count: int, what: str, **fields: Any) -> list[dict[str, Any]]:
        """Wait until workers have noted an event a number of times."""
        return until(
            f"{count} x {what} {fields}",
            lambda: found if len(found := self.events(what, **fields)) >= count else None,
            60,
        )

    def connected(self) -> list[str]:
        """Return the nodes whose daemon has a connection."""
        nodes = json.loads(self.unicron("status", "--json"))["nodes"]
        return sorted(label for label, node in nodes.items() if node["connected"])

    def below(self, node: str) -> list[psutil.Process]:
        """Return all processes that a daemon has started, directly or not."""
        return list(psutil.Process(self.daemons[node].pid).children(recursive=True))


def unicron(*words: str, status: int = 0, environment: dict[str, str] | None = None) -> str:
    """Run a command; return its output, or its errors if it must fail."""
    command = [sys.executable, "-c", MAIN, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stderr
    return done.stdout if status == 0 else done.stderr


def kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


def gone(processes: list[psutil.Process]) -> bool:
    """Return whether all of them have ended."""
    return all(not each.is_running() or each.status() == psutil.STATUS_ZOMBIE for each in processes)
