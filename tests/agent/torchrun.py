"""Agents whose workers note events in a shared file."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from unicron_lightning.local_cluster.cluster import LocalCluster
from unicron_lightning.local_cluster.processes import until

HERE = Path(__file__).parent
START_SECONDS = 90.0
"""Time that a worker may take to start, on a busy machine."""


def noted(folder: Path, what: str, **fields: Any) -> list[dict[str, Any]]:
    """Return the notes of a folder's workers, oldest first; not a last one that is still being written."""
    path = folder / "events.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]
    return [line for line in lines if line["what"] == what and fields.items() <= line.items()]


def wait_noted(folder: Path, count: int, what: str, seconds: float = 60.0, **fields: Any) -> list[dict[str, Any]]:
    """Wait until workers have noted an event a number of times."""
    return until(
        f"{count} x {what} {fields}",
        lambda: found if len(found := noted(folder, what, **fields)) >= count else None,
        seconds,
    )


class Cluster(LocalCluster):
    """Agents of one task, none at first."""

    def __init__(self, folder: Path, script: str, nodes: str, per_node: int = 1, **conf: object) -> None:
        super().__init__(
            [HERE / script, folder],
            nodes=0,
            nnodes=nodes,
            workers_per_node=per_node,
            max_restarts=100,
            conf={"allow_injection": "false", **conf},
            folder=folder,
            stop_seconds=0.0,
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for log in (*self.folder.glob("*.log"), *self.state_dir.glob("*.log"), *self.folder.glob("events.jsonl")):
                print(f"==== {log.name}\n{log.read_text()[-6000:]}")
        super().__exit__(kind, error, trace)

    def notes(self, what: str, **fields: Any) -> list[dict[str, Any]]:
        """Return notes of the workers, oldest first."""
        return noted(self.folder, what, **fields)

    def wait_notes(self, count: int, what: str, seconds: float = 60.0, **fields: Any) -> list[dict[str, Any]]:
        """Wait until workers have noted an event a number of times."""
        return wait_noted(self.folder, count, what, seconds, **fields)

    def kill_first(self, step: int) -> int:
        """Kill rank 0's worker once that rank has noted a step, or a later one; return the worker's process number."""
        found = until(
            f"step {step}",
            lambda: [note["pid"] for note in self.notes("step", rank=0) if note["step"] >= step],
            START_SECONDS,
        )
        os.kill(found[-1], signal.SIGKILL)
        return int(found[-1])

    def finish(self) -> list[int]:
        """Let the workers end and return the agents' exit statuses."""
        (self.folder / "finish").touch()
        return list(self.wait_exit(60).values())


def workers_of(agent: int) -> list[psutil.Process]:
    """Return the worker processes of an agent."""
    children = psutil.Process(agent).children()
    return [child for child in children if "_worker.py" in " ".join(command_line(child))]


def command_line(process: psutil.Process) -> list[str]:
    """Return a process's command line; empty if it ended meanwhile, e.g. a killed coordinator that is not
    reaped yet.
    """
    try:
        return process.cmdline()
    except psutil.Error:
        return []
