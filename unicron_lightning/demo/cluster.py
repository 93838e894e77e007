"""The clusters of the two acts: local clusters whose workers' diaries are read."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from unicron_lightning import environ
from unicron_lightning.demo.proof import ProofLine
from unicron_lightning.errors import CoordinatorUnavailable
from unicron_lightning.local_cluster.cluster import LocalCluster
from unicron_lightning.local_cluster.processes import until

ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


class Diary:
    """The lines of all workers of a task, in ``lines``.

    Args:
        folder: of the workers' files.
    """

    def __init__(self, folder: Path) -> None:
        self.lines: list[ProofLine] = []
        self._folder = folder
        self._offsets: dict[Path, int] = {}

    def read(self) -> None:
        """Add the new complete lines."""
        for path in sorted(self._folder.glob("worker-*.jsonl")):
            with path.open() as file:
                file.seek(self._offsets.get(path, 0))
                text = file.read()
            whole = text[: text.rfind("\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole.encode())
            self.lines.extend(json.loads(line) for line in whole.splitlines())


class OneTask(LocalCluster):
    """Agents of one task with an embedded coordinator.

    Args:
        out: folder for logs, diaries and results.
        nodes: number of agents.
        arguments: of the training script.
    """

    def __init__(self, out: Path, nodes: int, arguments: Sequence[str] = ()) -> None:
        command = ["-m", "unicron_lightning.demo.train", *arguments, "--out", str(out), "--nodes", str(nodes)]
        super().__init__(command, nodes=nodes, task="demo", environment=ENVIRONMENT, folder=out)
        self._diary = Diary(self.folder)

    @property
    def diary(self) -> list[ProofLine]:
        """Lines of all workers so far."""
        return self._diary.lines

    def wait(self, timeout: float) -> None:
        """Wait until all agents have exited.

        Raises:
            RuntimeError: an agent has failed; the message names its log.
            TimeoutError: the agents have not exited in ``timeout`` seconds.
        """
        failed = {node: code for node, code in self.wait_exit(timeout).items() if code}
        if failed:
            raise RuntimeError(f"agents ended with {failed}; logs are in {self.folder}")
        self._diary.read()

    def wait_line(self, condition: Callable[[], ProofLine | None], timeout: float = 120.0) -> None:
        """Read the diaries until ``condition`` returns a line."""

        def read() -> ProofLine | None:
            self._diary.read()
            return condition()

        until(f"a line of the diaries; logs are in {self.folder}", read, timeout, poll_seconds=0.001)

    def step(self) -> int:
        """Last finished step."""
        return max((line["step"] for line in self.diary if line["event"] == "step"), default=0)

    def worker(self, node: int) -> int:
        """Process of the node's present worker."""
        return int([x for x in self.diary if x["event"] == "start" and x["node"] == f"node{node}"][-1]["pid"])

    def strike(self, fault: str) -> float:
        """Inject a fault; return the time at which it was noted, just before it struck."""
        with contextlib.suppress(CoordinatorUnavailable):  # a killed coordinator does not answer
            self.inject(fault)
        return float(self.events("fault_injected")[-1]["at"])


class SharedNodes(LocalCluster):
    """A coordinator, daemons and submitted jobs, each with a diary in a folder of its name.

    Args:
        out: folder for logs, the coordinator's state and the tasks' own folders.
        nodes: number of nodes, each with one slot.
    """

    def __init__(self, out: Path, nodes: int) -> None:
        # The nodes share this machine's processors: imports of their prepared processes would slow the tasks whose
        # throughput the planner measures.
        super().__init__(nodes=nodes, environment={**ENVIRONMENT, environ.PREPARE: "0"}, folder=out)
        self._diaries: dict[str, Diary] = {}

    # ---- actions

    def start_job(self, name: str, command: Sequence[str], **limits: float) -> None:
        """Submit a job, whose output goes to its folder."""
        folder = self.folder / name
        folder.mkdir()
        self._diaries[name] = Diary(folder)
        self.submit(name, [*command, "--out", str(folder)], **limits)

    def stop(self, task: str) -> float:
        """End a task's training successfully; return the time."""
        (self.folder / task / "stop").touch()
        return time.time()

    # ---- observations

    def world(self, task: str, after: float = 0.0) -> int:
        """Number of workers that finished the task's last step, if it was later than ``after``."""
        steps = self.steps(task)
        return int(steps[-1]["world"]) if steps and steps[-1]["at"] > after else 0

    def wait_worlds(self, worlds: Mapping[str, int], timeout: float = 150.0) -> float:
        """Wait until each named task has finished a new step with the given number of workers; return the start of the
        wait.

        Raises:
            TimeoutError: a task has not within ``timeout`` seconds; the message names it and the folder of the logs.
        """
        since = time.time()
        for task, size in worlds.items():
            self.until(f"{task} with {size} workers", partial(self._trains, task, size, since), timeout)
        return since

    def diary(self, task: str) -> list[ProofLine]:
        """Lines of all workers of a task so far."""
        self._diaries[task].read()
        return self._diaries[task].lines

    def steps(self, task: str) -> list[ProofLine]:
        """The finished steps, each once, in order."""
        first: dict[int, ProofLine] = {}
        for line in self.diary(task):
            if line["event"] == "step":
                first.setdefault(line["step"], line)
        return [first[step] for step in sorted(first)]

    def nodes_of(self, task: str) -> list[str]:
        """Nodes whose slot is assigned to the task by the present plan."""
        assigned: dict[str, Any] = self.status()["assigned"]
        return sorted(place.split("/")[0] for place, name in assigned.items() if name == task)

    def _trains(self, task: str, size: int, since: float) -> bool:
        return self.world(task, since) == size
