"""Python stacks of all threads of a worker that hangs, without its help.

The worker registers a signal with `faulthandler`, whose handler is C and needs neither the interpreter's lock nor any
thread that still runs. Its agent sends the signal and reads the file.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
from pathlib import Path
from typing import Final

SIGNAL: Final = signal.SIGRTMIN + 10
"""One that nobody else uses: SIGUSR1 and SIGUSR2 are the scripts'."""
CAPTURE_SECONDS: Final = 0.5
_POLL_SECONDS: Final = 0.01
_MOST_BYTES: Final = 64 * 1024


def _path(folder: Path, pid: int) -> Path:
    return folder / f"stacks-{pid}"


class StackFile:
    """[in the worker] Where the stacks go when the signal comes.

    Args:
        folder: the agent's private one.
    """

    def __init__(self, folder: Path) -> None:
        self._path = _path(folder, os.getpid())
        self._file = self._path.open("wb", buffering=0)
        faulthandler.register(SIGNAL, self._file, all_threads=True, chain=False)

    def close(self) -> None:
        """No more."""
        if not self._file.closed:
            self._path.unlink(missing_ok=True)  # first: without it the signal is not sent
            faulthandler.unregister(SIGNAL)
            self._file.close()


async def capture(folder: Path, pid: int, pidfd: int) -> str:
    """[in the agent] The stacks of a process' threads, each with its innermost call first; "" if it gives none.

    Args:
        folder: this agent's.
        pid: the worker's process.
        pidfd: the same.
    """
    path = _path(folder, pid)
    if not path.exists():  # it has not come so far: the signal would end it
        return ""
    before = path.stat().st_size
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, SIGNAL)
    size, loop = before, asyncio.get_running_loop()
    deadline = loop.time() + CAPTURE_SECONDS
    while loop.time() < deadline:
        await asyncio.sleep(_POLL_SECONDS)
        newer = path.stat().st_size
        if newer > before and newer == size:  # nothing was added since the last look
            break
        size = newer
    with path.open("rb") as file:
        file.seek(before)
        return file.read(_MOST_BYTES).decode(errors="replace")
