"""The coordinator's clock: time.time() at its start, and from then on as evenly as the monotonic clock goes.

Durations are differences of its readings. An operator or a time service that sets the machine's clock changes none of
them, so no incident is billed a day that nobody waited.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class SteadyClock:
    """Seconds since 1970, as known when the clock was made.

    Args:
        wall: time.time(), or a stand-in.
        monotonic: time.monotonic(), or a stand-in.
    """

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._offset = wall() - monotonic()

    def now(self) -> float:
        """The time."""
        return self._offset + self._monotonic()
