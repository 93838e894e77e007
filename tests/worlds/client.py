"""Runs scenarios in worlds of real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

FORKS = Path(__file__).with_name("forks.py")


class Worlds:
    """Runs scenarios: functions ``(rank, world, folder, **arguments)`` of modules of a test folder.

    Args:
        process: that forks.
        seconds: time limit of a scenario; None: that process's own.
    """

    def __init__(self, process: subprocess.Popen[str], seconds: int | None = None) -> None:
        self._process = process
        self._limit = {} if seconds is None else {"seconds": seconds}

    def run(self, scenario: str, world: int, folder: Path, *, killed: tuple[int, ...] = (), **arguments: Any) -> Any:
        """Each rank's result; None for the ``killed`` ones, which must have died by SIGKILL."""
        exits = self.exits(scenario, world, folder, **arguments)
        logs = "\n".join((folder / f"{rank}.log").read_text() for rank in range(world) if exits[rank])
        assert exits == [-9 if rank in killed else 0 for rank in range(world)], logs
        return [None if rank in killed else self.result(folder, rank) for rank in range(world)]

    def result(self, folder: Path, rank: int) -> Any:
        """A rank's result."""
        return json.loads((folder / f"{rank}.json").read_text())

    def exits(self, scenario: str, world: int, folder: Path, **arguments: Any) -> list[int]:
        """The ranks' exit codes."""
        assert self._process.stdin is not None and self._process.stdout is not None
        folder.mkdir(parents=True, exist_ok=True)
        request = {"scenario": scenario, "world": world, "arguments": arguments, "folder": str(folder)}
        request |= self._limit
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        exits: list[int] = json.loads(self._process.stdout.readline())["exits"]
        return exits


@contextmanager
def worlds_of(folder: Path, *modules: str, seconds: int | None = None) -> Iterator[Worlds]:
    """Start the process that forks worlds.

    Args:
        folder: has the modules of the scenarios, which may import those of other folders of tests.
        modules: imported before the first world.
        seconds: time limit of a scenario.
    """
    paths = [str(folder), str(FORKS.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(FORKS), *modules]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        yield Worlds(process, seconds)
        assert process.stdin is not None
        process.stdin.close()
