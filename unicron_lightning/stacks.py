"""Python stacks of all threads of a hanging worker, taken without its cooperation.

The worker registers a signal with `faulthandler`, whose handler is C and needs neither the interpreter's lock nor any
running thread. Its agent sends the signal and reads the file.
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
"""A signal without other uses: SIGUSR1 and SIGUSR2 belong to the scripts."""
CAPTURE_SECONDS: Final = 0.5
_POLL_SECONDS: Final = 0.01
_MOST_BYTES: Final = 64 * 1024


def _path(folder: Path, pid: int) -> Path:
    return folder / f"stacks-{pid}"


class StackFile:
    """[in the worker] File that receives the stacks when the signal arrives.

    Args:
        folder: the agent's private one.
    """

    def __init__(self, folder: Path) -> None:
        self._path = _path(folder, os.getpid())
        self._file = self._path.open("wb", buffering=0)
        faulthandler.register(SIGNAL, self._file, all_threads=True, chain=False)

    def close(self) -> None:
        """Unregister the signal and remove the file."""
        if not self._file.closed:
            self._path.unlink(missing_ok=True)  # removed first, since the signal is not sent without it
            faulthandler.unregister(SIGNAL)
            self._file.close()


async def capture(folder: Path, pid: int, pidfd: int) -> str:
    """[in the agent] The stacks of a process' threads, each with its innermost call first; "" without an answer.

    Args:
        folder: this agent's.
        pid: the worker's process.
        pidfd: of the same process.
    """
    path = _path(folder, pid)
    if not path.exists():  # not registered yet: the signal would end the process
        return ""
    before = path.stat().st_size
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, SIGNAL)
    size, loop = before, asyncio.get_running_loop()
    deadline = loop.time() + CAPTURE_SECONDS
    while loop.time() < deadline:
        await asyncio.sleep(_POLL_SECONDS)
        newer = path.stat().st_size
        if newer > before and newer == size:  # nothing was added since the last check
            break
        size = newer
    with path.open("rb") as file:
        file.seek(before)
        return file.read(_MOST_BYTES).decode(errors="replace")
