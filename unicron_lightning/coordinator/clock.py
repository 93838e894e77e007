"""The coordinator's clock: time.time() at its start, advanced by the monotonic clock.

Durations are differences of its readings. Setting the machine's clock, by an operator or a time service, changes none
of them, so no incident is billed for time that did not pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class SteadyClock:
    """Seconds since 1970, anchored at the creation of the clock.

    Args:
        wall: time.time(), or a stand-in.
        monotonic: time.monotonic(), or a stand-in.
    """

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._offset = wall() - monotonic()

    def now(self) -> float:
        """Return the time."""
        return self._offset + self._monotonic()
