"""A coordinator, a daemon per node and submitted jobs on this machine, with methods to kill them."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from unicron_lightning.cli.client import Access, fetch
from unicron_lightning.credentials import Token
from unicron_lightning.demo.cluster import free_port
from unicron_lightning.demo.diary import Diary, Line
from unicron_lightning.errors import CoordinatorUnavailable


class Nodes:
    """All processes of the act. A context manager that leaves no process behind.

    Args:
        out: folder for logs, the coordinator's state and the tasks' own folders.
        number: of nodes, each with one slot.
    """

    def __init__(self, out: Path, number: int) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out = out
        self._port = free_port()
        self._environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            "UNICRON_TOKEN": secrets.token_hex(16),
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._diaries: dict[str, Diary] = {}
        state = out / "coordinator"
        self._start("coordinator", "coordinator", f"coordinator.port={self._port}", f"store.state_dir={state}")
        self.until(self._answers, "the coordinator")
        for node in range(number):
            self.start_node(f"node{node}")

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes.values()):
            process.terminate()
        for process in reversed(self._processes.values()):
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    # ---- actions

    def start_node(self, node: str) -> float:
        """Start (or restart) the node's daemon, as a service manager would; return the time."""
        at = time.time()
        logs = str(self.out / "logs")
        self._start(node, "agent", "--node", node, "--slots", "1", "--logs", logs, *self._endpoint())
        return at

    def submit(self, name: str, command: Sequence[str], **limits: float) -> None:
        """Submit a job, whose output goes to the folder NAME."""
        folder = self.out / name
        folder.mkdir()
        self._diaries[name] = Diary(folder)
        definition = {"name": name, "command": [*command, "--out", str(folder)], **limits}
        path = self.out / f"{name}.yaml"
        path.write_text(json.dumps(definition))  # JSON is YAML
        self.order("submit", str(path))

    def order(self, *words: str) -> None:
        """Run a command of ``unicron``, as an operator would."""
        command = [sys.executable, "-m", "unicron_lightning.cli", *words, *self._endpoint()]
        subprocess.run(command, env=self._environment, check=True, stdout=subprocess.DEVNULL, timeout=60)

    def kill_node(self, node: str) -> float:
        """Send SIGKILL to all processes on a node, as a power failure would; return the time."""
        workers = [
            line["pid"]
            for diary in self._diaries.values()
            for line in diary.lines
            if line["event"] == "start" and line["node"] == node
        ]
        at = time.time()
        self._processes[node].kill()  # torchrun has the parent death signal
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
        self._processes.pop(node).wait()
        return at

    def stop(self, task: str) -> float:
        """End a task's training successfully; return the time."""
        (self.out / task / "stop").touch()
        return time.time()

    # ---- observations

    def until(self, condition: Callable[[], bool], what: str, timeout: float = 150.0) -> None:
        """Wait for a condition.

        Raises:
            TimeoutError: the condition did not hold within ``timeout`` seconds; the message names the folder of the
                logs.
        """
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {timeout:g} s: {what}; logs are in {self.out}")
            time.sleep(0.05)

    def world(self, task: str, after: float = 0.0) -> int:
        """Number of workers that finished the task's last step, if it was later than ``after``."""
        steps = self.steps(task)
        return int(steps[-1]["world"]) if steps and steps[-1]["at"] > after else 0

    def wait_worlds(self, worlds: Mapping[str, int], timeout: float = 150.0) -> float:
        """Wait until each named task has finished a new step with the given number of workers; return the start of the
        wait.

        Raises:
            TimeoutError: see `until`.
        """
        since = time.time()
        for task, size in worlds.items():
            self.until(partial(self._trains, task, size, since), f"{task} with {size} workers", timeout)
        return since

    def wait_success(self, task: str) -> None:
        """Wait until a task has succeeded.

        Raises:
            TimeoutError: see `until`.
        """
        self.until(lambda: self.state_of(task) == "succeeded", f"the end of task {task}")

    def diary(self, task: str) -> list[Line]:
        """Lines of all workers of a task so far."""
        self._diaries[task].read()
        return self._diaries[task].lines

    def steps(self, task: str) -> list[Line]:
        """The finished steps, each once, in order."""
        first: dict[int, Line] = {}
        for line in self.diary(task):
            if line["event"] == "step":
                first.setdefault(line["step"], line)
        return [first[step] for step in sorted(first)]

    def nodes_of(self, task: str) -> list[str]:
        """Nodes whose slot is assigned to the task by the present plan."""
        assigned = self.get("/v1/status")["assigned"]
        return sorted(place.split("/")[0] for place, name in assigned.items() if name == task)

    def state_of(self, task: str) -> str:
        """State of a job: queued, running, succeeded, ..."""
        return str(self.get(f"/v1/jobs/{task}")["state"])

    def events(self) -> list[Line]:
        """The coordinator's event log."""
        return list(self.get("/v1/events"))

    def get(self, path: str) -> Any:
        """Send a request to the coordinator."""
        token = Token(secret=self._environment["UNICRON_TOKEN"], origin="the demonstration")
        return fetch(f"127.0.0.1:{self._port}", path, Access(token=token))

    def _trains(self, task: str, size: int, since: float) -> bool:
        return self.world(task, since) == size

    def _answers(self) -> bool:
        try:
            return bool(self.get("/healthz"))
        except CoordinatorUnavailable:
            return False

    def _endpoint(self) -> list[str]:
        return ["--endpoint", f"127.0.0.1:{self._port}"]

    def _start(self, name: str, *words: str) -> None:
        command = [sys.executable, "-m", "unicron_lightning.cli", *words]
        with (self.out / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(command, env=self._environment, stdout=log, stderr=log)
