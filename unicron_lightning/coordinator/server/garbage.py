"""Full runs of Python's garbage collector, at times that suit the coordinator.

A full run visits every object: 0.3 s with ten thousand agents, in the middle of whatever allocates. Left alone, it also
runs each time the heap has grown by a quarter, a fifth of the time in which ten thousand agents register. Only
connections that have ended leave cycles behind, so that their number decides.
"""

from __future__ import annotations

import asyncio
import gc
from typing import Final

_YOUNG: Final = 5_000
_MIDDLE: Final = 10
_NEVER: Final = 1_000_000
_FEWEST: Final = 256
_LOOK_SECONDS: Final = 5.0


def defer_full_runs() -> None:
    """Leave full runs of this process to `FullCollections`; runs over young objects take some milliseconds."""
    gc.set_threshold(_YOUNG, _MIDDLE, _NEVER)


class FullCollections:
    """Runs the collector in full once enough connections have ended."""

    def __init__(self) -> None:
        self._ended = self._alive = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start looking."""
        self._timer = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)

    def close(self) -> None:
        """Stop looking."""
        if self._timer is not None:
            self._timer.cancel()

    def ended(self, alive: int) -> None:
        """Count the end of a connection; ``alive`` is the number of the others."""
        self._ended, self._alive = self._ended + 1, alive

    def _look(self) -> None:
        if self._ended >= max(_FEWEST, self._alive // 2):
            self._ended = 0
            gc.collect()
        self.start()
