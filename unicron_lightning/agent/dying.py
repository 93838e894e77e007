"""The end of a process before it can be waited for.

A killed process ends only when its memory is freed: with torch loaded, 40 to 200 ms after the signal, the busier the
machine the later. Until then neither its parent nor the peers of its sockets hear of it. But its threads end at once,
all but the one that frees the memory: Linux 6.9 and newer tell of the end of a thread by a pidfd, and how the process
will end is in /proc. Older ones tell nothing, and the process's own end is waited for.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Final

_PIDFD_THREAD: Final = os.O_EXCL
"""Flag of pidfd_open(2): of one thread."""
_PF_EXITING: Final = 0x4
_STATE, _FLAGS, _EXIT_CODE = 0, 6, 49
"""Fields of /proc/PID/stat, counted from the one after the name (proc(5))."""
_MOST_THREADS: Final = 8
_AGAIN_SECONDS: Final = 0.001
_LOOKS: Final = 50
"""So often, where nothing says that the process is to die."""


class Threads:
    """Watches some threads of a process, from the event loop.

    Args:
        pid: the process.
        on_dying: called once, with the wait status with which it will end, if that is no success.
    """

    def __init__(self, pid: int, on_dying: Callable[[int], None]) -> None:
        self._pid = pid
        self._on_dying = on_dying
        self._fds: dict[int, int] = {}
        self._retry: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Watch the threads that there are now, but for the main one, which the kernel keeps to the end."""
        loop = asyncio.get_running_loop()
        for thread in _threads(self._pid)[:_MOST_THREADS]:
            if thread not in self._fds and (fd := _open(thread)) is not None:
                self._fds[thread] = fd
                loop.add_reader(fd, self._thread_ended, thread)

    def close(self) -> None:
        """Watch nothing any more."""
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
        """Threads end in live processes too: whether this one is dying its main thread says, but maybe not yet."""
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
    """The wait status of a process that is about to end by a signal or with a status other than 0.

    None if it lives, if it ends well, which is nothing to hurry for, or if the kernel does not tell.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return None
    exiting = fields[_STATE] in ("Z", "X") or int(fields[_FLAGS]) & _PF_EXITING
    return int(fields[_EXIT_CODE]) or None if exiting else None


def is_doomed(pid: int) -> bool:
    """Whether its main thread has still to be given a CPU to die on: SIGKILL is pending for it.

    A thread that ends the process has the kernel kill the others, too.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    pending = next((int(line.split()[1], 16) for line in lines if line.startswith("SigPnd:")), 0)
    return bool(pending & 1 << signal.SIGKILL - 1)


def _threads(pid: int) -> list[int]:
    """All but the main one."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task") if int(name) != pid]
    except OSError:
        return []


def _open(thread: int) -> int | None:
    try:
        return os.pidfd_open(thread, _PIDFD_THREAD)
    except OSError:  # the thread has ended, or the kernel is older
        return None
