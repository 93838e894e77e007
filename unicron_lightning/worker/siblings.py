"""Workers of one agent that end by the same error: each waits until the others have run their hooks.

torchrun ends the other workers of an agent once one of them has exited. One of them may still write a checkpoint.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Final

HOOKS_SECONDS: Final = 300.0
"""Most seconds for the hooks after an error, such as checkpoints."""
_LOOK_SECONDS: Final = 0.05


class EndingSiblings:
    """A lock that the workers of an agent share while they run their hooks after an error.

    Args:
        folder: the agent's.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "ending"
        self._lock: int | None = None

    def begin(self) -> None:
        """Record that this worker runs its hooks. Its death ends the record."""
        if self._lock is None:
            self._lock = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_SH)

    def wait(self, seconds: float = HOOKS_SECONDS) -> bool:
        """Record that this worker has run its hooks, and wait for its siblings, at most ``seconds``.

        Returns:
            Whether none of them runs hooks any more.
        """
        if self._lock is None:
            return True
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        deadline = time.monotonic() + seconds
        alone = False
        while not (alone := self._is_alone(self._lock)) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        os.close(self._lock)
        self._lock = None
        return alone

    @staticmethod
    def _is_alone(lock: int) -> bool:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
