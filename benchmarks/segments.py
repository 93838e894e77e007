"""Segments of a training: it records the ends of steps, and waits between segments for orders of `overhead`.

Rank 0 writes ``segment_<k>.json``: a JSON list of [time, CPU time of this process, further seconds], each so far, at
the end of each optimizer step of segment k. All ranks then wait for the file ``go_<k + 1>``.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Final

FOLDER: Final = Path(os.environ["BENCH_LOG"])


class Segments:
    """The segments of a process.

    Args:
        steps: of a segment.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._segment = 0
        self._ends: list[tuple[float, float, float]] = []

    def end_step(self, rank: int, further: float = 0.0) -> None:
        """Record the end of a step; at the end of a segment, wait for the next one."""
        self._ends.append((time.perf_counter(), time.process_time(), further))
        if len(self._ends) < self._steps:
            return
        if rank == 0:
            path = FOLDER / f"segment_{self._segment}.json"
            path.with_suffix(".tmp").write_text(json.dumps(self._ends))
            path.with_suffix(".tmp").rename(path)
        self._segment += 1
        self.wait()

    def wait(self) -> None:
        """Wait for the order to begin a segment; the process ends if there is none any more."""
        while not (FOLDER / f"go_{self._segment}").exists():
            if (FOLDER / "stop").exists():
                os._exit(0)
            time.sleep(0.002)
        self._ends = []
