"""Detection of a process's end before it can be waited for.

A killed process ends only when its memory is freed: with torch loaded, 40 to 200 ms after the signal, later on a busy
machine. Until then neither its parent nor the peers of its sockets are notified. Its threads end immediately, except
for the one that frees the memory. Linux 6.9 and newer report the end of a thread through a pidfd, and /proc shows the
process's future exit status. On older kernels, the end of the process itself is awaited.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Final

from unicron_lightning import environ
from unicron_lightning.regular_files import open_regular

_PIDFD_THREAD: Final = os.O_EXCL
"""Flag of pidfd_open(2) for a single thread."""
_PF_EXITING: Final = 0x4
_STATE, _FLAGS, _EXIT_CODE = 0, 6, 49
"""Fields of /proc/PID/stat, counted from the one after the name (proc(5))."""
_MOST_THREADS: Final = 8
_AGAIN_SECONDS: Final = 0.001
_LOOKS: Final = 50
"""Number of checks while no evidence indicates that the process will end."""


class Threads:
    """Watches some threads of a process, from the event loop.

    Args:
        pid: the process.
        on_dying: called once, with the wait status with which the process will end, unless that is a success.
    """

    def __init__(self, pid: int, on_dying: Callable[[int], None]) -> None:
        self._pid = pid
        self._on_dying = on_dying
        self._fds: dict[int, int] = {}
        self._retry: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Watch the present threads except the main one, which the kernel keeps to the end."""
        loop = asyncio.get_running_loop()
        for thread in _threads(self._pid)[:_MOST_THREADS]:
            if thread not in self._fds and (fd := _open(thread)) is not None:
                self._fds[thread] = fd
                loop.add_reader(fd, self._thread_ended, thread)

    def close(self) -> None:
        """Stop watching."""
        for thread in list(self._fds):
            self._forget(thread)
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    def _thread_ended(self, thread: int) -> None:
        self._forget(thread)
        if self._retry is None:
            self._look(_LOOKS)

    def _look(self, left: int) -> None:
        """Check the process: threads end in live processes too, and its main thread may show the end only later."""
        self._retry = None
        status = exit_status_of_dying(self._pid)
        if status is not None:
            self.close()
            self._on_dying(status)
        elif (doomed := is_doomed(self._pid)) or left > 0:
            self._retry = asyncio.get_running_loop().call_later(_AGAIN_SECONDS, self._look, left - (not doomed))

    def _forget(self, thread: int) -> None:
        fd = self._fds.pop(thread)
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)


def exit_status_of_dying(pid: int) -> int | None:
    """Return the wait status of a process that is about to end by a signal or with a status other than 0.

    None if it lives, if it ends successfully, which is not urgent, or if the kernel does not show it.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return None
    exiting = fields[_STATE] in ("Z", "X") or int(fields[_FLAGS]) & _PF_EXITING
    return int(fields[_EXIT_CODE]) or None if exiting else None


def is_doomed(pid: int) -> bool:
    """Whether the main thread only waits for a CPU to exit: SIGKILL is pending for it.

    A thread that ends the process makes the kernel kill the others, too.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    pending = next((int(line.split()[1], 16) for line in lines if line.startswith("SigPnd:")), 0)
    return bool(pending & 1 << signal.SIGKILL - 1)


def _threads(pid: int) -> list[int]:
    """List all threads but the main one."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task") if int(name) != pid]
    except OSError:
        return []


def _open(thread: int) -> int | None:
    try:
        return os.pidfd_open(thread, _PIDFD_THREAD)
    except OSError:  # the thread has ended, or the kernel is older
        return None


_OWN: Final = Path("/proc/self/fd/2")
_MOST_BYTES: Final = 16_384
_LINES: Final = 6
_LINE_LENGTH: Final = 200
_FOREIGN: Final = re.compile(r"[A-Z]\d{4} \d\d:\d\d:\d\d|---- |[a-z_]+ (task|agent|worker|reason)=")
"""Beginning of a line that torchelastic, a daemon or an agent has written into the same file."""


class LastOutput:
    """Last lines of the output of workers that ended before they could report anything, as with a wrong path.

    Workers write to files that torchrun was given: its own standard error, if that is a regular file, or the log files
    of a daemon. The present size of each file is recorded before a round's workers start. Output to a terminal or a
    pipe is not read.

    Args:
        folder: log files ``rank<local rank>.log`` of a daemon; None: workers write to this process's standard error.
        own: path of that standard error; replaced in tests.
    """

    def __init__(self, folder: Path | None = None, own: Path = _OWN) -> None:
        self._folder = folder
        self._own = own
        self._begun: dict[Path, int] = {}

    def begin(self, local_world: int) -> None:
        """Record where the output of the workers begins that are about to start."""
        self._begun = {path: _size(path) for path in {self._path(rank) for rank in range(local_world)}}

    def lines(self, local_rank: int) -> tuple[str, ...]:
        """Return the last lines of a worker, without control characters; none if they cannot be read.

        With a shared file they may be those of a sibling.
        """
        path = self._path(local_rank)
        text = _read(path, self._begun.get(path, 0)).decode(errors="replace")
        lines = [line.rstrip() for line in text.splitlines() if line.strip() and not _FOREIGN.match(line)]
        return tuple("".join(filter(str.isprintable, line))[:_LINE_LENGTH] for line in lines[-_LINES:])

    def _path(self, local_rank: int) -> Path:
        return self._own if self._folder is None else self._folder / f"rank{local_rank}.log"


def folder_of_logs() -> Path | None:
    """Return the folder in which a daemon keeps the output of this process's workers, if one does."""
    folder = os.environ.get(environ.LOGS)
    return None if folder is None else Path(folder)


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def _read(path: Path, begin: int) -> bytes:
    """Read the end of a regular file that has grown since; a file that was rotated meanwhile is read from its start."""
    with contextlib.suppress(OSError), open(path, "rb", opener=open_regular) as file:
        about = os.fstat(file.fileno())
        begin = begin if begin <= about.st_size else 0
        file.seek(max(begin, about.st_size - _MOST_BYTES))
        return file.read(_MOST_BYTES)
    return b""
