"""The demo workers' diaries, read as they grow."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Line = dict[str, Any]


class Diary:
    """The lines of all workers of a task, in ``lines``.

    Args:
        folder: of the workers' files.
    """

    def __init__(self, folder: Path) -> None:
        self.lines: list[Line] = []
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


def micro_batches(lines: Iterable[Line]) -> dict[tuple[int, tuple[int, ...]], list[int]]:
    """The processes that computed each micro-batch, in the diary's order, by its step and samples."""
    workers: dict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
    for line in lines:
        if line["event"] == "micro_batch":
            workers[line["step"], tuple(line["samples"])].append(line["pid"])
    return workers


def wasted(lines: Iterable[Line], dead: set[int]) -> int:
    """Number of micro-batches that were recomputed although a worker that had finished them survived."""
    return sum(any(pid not in dead for pid in pids[:-1]) for pids in micro_batches(lines).values())
