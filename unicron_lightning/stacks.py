"""Python stacks of all threads of a hanging worker.

The agent asks first: a thread of the worker writes them, with the interpreter's lock, so no frame changes meanwhile. A
worker whose lock is held does not answer. It gets a signal, whose handler, `faulthandler`'s, is C and needs neither the
lock nor any running thread. The handler reads frames as they are: while another thread executes Python, it can read one
that is just ended, which has ended the process by SIGSEGV. So the signal is only for a process that is frozen.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
import threading
from pathlib import Path
from typing import Final

SIGNAL: Final = signal.SIGRTMIN + 10
"""A signal without other uses: SIGUSR1 and SIGUSR2 belong to the scripts."""
ANSWER_SECONDS: Final = 1.0
"""Longest wait for an answer; with `CAPTURE_SECONDS` it stays below the coordinator's wait for a report."""
CAPTURE_SECONDS: Final = 0.5
_POLL_SECONDS: Final = 0.01
_MOST_BYTES: Final = 64 * 1024
_MOST_QUESTIONS: Final = 4096
_END: Final = b"e"


def _path(folder: Path, pid: int) -> Path:
    return folder / f"stacks-{pid}"


def _questions(folder: Path, pid: int) -> Path:
    return folder / f"stacks-{pid}-questions"


class StackFile:
    """[in the worker] File that receives the stacks when the agent asks, or when its signal arrives.

    Args:
        folder: the agent's private one.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._pipe = _path(folder, os.getpid()), _questions(folder, os.getpid())
        self._file = self._path.open("wb", buffering=0)
        faulthandler.register(SIGNAL, self._file, all_threads=True, chain=False)
        os.mkfifo(self._pipe, 0o600)
        self._asked = os.open(self._pipe, os.O_RDWR)  # with a writer of its own it never ends
        self._thread = threading.Thread(target=self._answer, name="unicron-stacks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Unregister the signal, end the thread and remove the files."""
        if not self._file.closed:
            self._path.unlink(missing_ok=True)  # removed first, since the signal is not sent without it
            self._pipe.unlink(missing_ok=True)
            faulthandler.unregister(SIGNAL)
            os.write(self._asked, _END)
            self._thread.join()
            os.close(self._asked)
            self._file.close()

    def _answer(self) -> None:
        while _END not in os.read(self._asked, _MOST_QUESTIONS):
            faulthandler.dump_traceback(self._file, all_threads=True)


async def ask(folder: Path, pid: int) -> str:
    """[in the agent] The stacks of a process' threads, each with its innermost call first; "" without an answer.

    Args:
        folder: this agent's.
        pid: the worker's process.
    """
    path = _path(folder, pid)
    try:
        before = path.stat().st_size
        pipe = os.open(_questions(folder, pid), os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # not there yet, or ended
        return ""
    try:
        os.write(pipe, b"?")
    except OSError:  # full: it has not answered for long
        return ""
    finally:
        os.close(pipe)
    return await _added(folder, pid, before, ANSWER_SECONDS)


async def capture(folder: Path, pid: int, pidfd: int) -> str:
    """[in the agent] The stacks of a frozen process, as `ask`.

    Args:
        folder: this agent's.
        pid: the worker's process.
        pidfd: of the same process.
    """
    path = _path(folder, pid)
    try:
        before = path.stat().st_size
    except FileNotFoundError:  # not registered yet: the signal would end the process
        return ""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, SIGNAL)
    return await _added(folder, pid, before, CAPTURE_SECONDS)


async def _added(folder: Path, pid: int, before: int, seconds: float) -> str:
    """Wait until the file has grown and grows no more; return what was added."""
    path = _path(folder, pid)
    size, loop = before, asyncio.get_running_loop()
    deadline = loop.time() + seconds
    try:
        while loop.time() < deadline:
            await asyncio.sleep(_POLL_SECONDS)
            newer = path.stat().st_size
            if newer > before and newer == size:  # nothing was added since the last check
                break
            size = newer
        with path.open("rb") as file:
            file.seek(before)
            return file.read(_MOST_BYTES).decode(errors="replace")
    except FileNotFoundError:  # the worker has ended in order
        return ""
