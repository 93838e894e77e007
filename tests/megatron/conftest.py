"""Worlds of real processes with megatron-core, gloo and the CPU shim."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

FORKS = Path(__file__).with_name("forks.py")


class Worlds:
    """Runs scenarios: functions ``(rank, world, folder, **arguments)`` of modules of this folder."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, scenario: str, world: int, folder: Path, *, killed: tuple[int, ...] = (), **arguments: Any) -> Any:
        """Each rank's result; None for the ``killed`` ones, which must have died by SIGKILL."""
        exits = self.exits(scenario, world, folder, **arguments)
        logs = "\n".join((folder / f"{rank}.log").read_text() for rank in range(world) if exits[rank])
        assert exits == [-9 if rank in killed else 0 for rank in range(world)], logs
        return [None if rank in killed else json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]

    def exits(self, scenario: str, world: int, folder: Path, **arguments: Any) -> list[int]:
        """The ranks' exit codes."""
        assert self._process.stdin is not None and self._process.stdout is not None
        folder.mkdir(parents=True, exist_ok=True)
        request = {"scenario": scenario, "world": world, "arguments": arguments, "folder": str(folder)}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        exits: list[int] = json.loads(self._process.stdout.readline())["exits"]
        return exits


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """The process that forks worlds; skips if megatron-core is not installed."""
    pytest.importorskip("megatron.core.package_info")
    command = [sys.executable, str(FORKS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Worlds(process)
        assert process.stdin is not None
        process.stdin.close()
