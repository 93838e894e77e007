"""Watches the worker processes and detects their end within a millisecond.

torchelastic polls its workers ten times a second and reports nothing to the rendezvous handler. Here each worker has a
pidfd in the agent's event loop, and so have its threads (`dying`): they end before their process does. The exit status
is read without reaping, so that torchelastic finds everything as it expects.

torchelastic does not name its workers' processes to the handler either: they are found among this process' children, by
the identity in their environment, until all expected ones are found.

**The end of a process** is detected before it can be waited for. A killed process ends only when its memory is freed:
with torch loaded, 40 to 200 ms after the signal, later on a busy machine. Until then neither its parent nor the peers
of its sockets are notified. Its threads end immediately, except for the one that frees the memory. Linux 6.9 and newer
report the end of a thread through a pidfd, and /proc shows the process's future exit status. On older kernels, the end
of the process itself is awaited.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import psutil  # type: ignore[import-untyped]

from unicron_lightning import environ
from unicron_lightning.agent.workers.forked import PREPARED, ForkedWorker
from unicron_lightning.errors import AgentUnavailable
from unicron_lightning.private_files import open_regular

logger = logging.getLogger(__name__)


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


_SEARCH_SECONDS: Final = 0.03
_SLOW_SEARCH_SECONDS: Final = 0.5
_SEARCHES_BEFORE_SLOW: Final = 200
_TAKING_SECONDS: Final = 0.05
"""Seconds that torchelastic's thread may take between collecting an exit status and storing it."""


@dataclass(frozen=True, kw_only=True)
class Exit:
    """The end of a worker: exit status or signal number in ``code``."""

    cause: Literal["exit", "signal"]
    code: int
    dumped: bool = False
    """Whether a core was written."""
    pid: int | None = None

    @property
    def is_clean(self) -> bool:
        """Whether the program succeeded."""
        return self.cause == "exit" and self.code == 0


@dataclass(frozen=True, kw_only=True)
class WatchedProcess:
    """A live worker process."""

    worker: str
    local_rank: int
    pid: int
    pidfd: int
    threads: Threads


class Supervisor:
    """Finds and watches the workers of one agent. Lives in the agent's event loop.

    Args:
        agent: identity of the agent, to distinguish its workers from other children.
        on_found: called with each worker found.
        on_exit: called with each worker's end, once.
    """

    def __init__(
        self,
        agent: str,
        on_found: Callable[[WatchedProcess], None],
        on_exit: Callable[[str, Exit], None],
    ) -> None:
        self._agent = agent
        self._on_found = on_found
        self._on_exit = on_exit
        self._live: dict[str, WatchedProcess] = {}
        self._search: asyncio.TimerHandle | None = None
        self._round = 0
        self._missing: set[int] = set()
        self._unnamed: dict[int, Exit] = {}
        """Ends of children that could not be identified any more, by process id."""
        self._searches = 0

    def expect(self, round_number: int, local_world: int) -> None:
        """Start searching for the workers of a round."""
        self._round = round_number
        self._missing = set(range(local_world))
        self._unnamed.clear()
        self._searches = 0
        self._find()

    def look_at(self, pid: int) -> None:
        """Watch a worker that has reported its process, maybe before it was found, and its present threads.

        A worker that a wrapper has started (`--no-python run.sh`, a profiler) is not watched, but its wrapper, whose
        child it is: only the status of a child can be read.
        """
        if _is_child(pid):
            self._look_at(pid)

    def find(self, worker: str) -> WatchedProcess | None:
        """Return the process of a live worker."""
        return self._live.get(worker)

    def kill(self, worker: str, number: int = signal.SIGKILL) -> None:
        """Send a worker a signal, if it lives; its end is reported as any other."""
        process = self._live.get(worker)
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process.pidfd, number)

    def end_round(self, assumed: Exit) -> dict[int, Exit]:
        """Report every worker that torchelastic has reaped before its end was seen here.

        Args:
            assumed: the exit to report for such a worker.

        Returns:
            The ends of workers that were started but never found, by local rank: they ended too soon.
        """
        never = sorted(self._missing)
        self._stop_search()
        for process in list(self._live.values()):
            self._ended(process, assumed)
        ends = [how for _, how in sorted(self._unnamed.items())]
        self._unnamed.clear()
        ends = ends if len(ends) == len(never) else [assumed] * len(never)
        return dict(zip(never, ends, strict=True))

    def close(self) -> None:
        """Stop watching; the processes are left alone."""
        self._stop_search()
        for process in list(self._live.values()):
            self._forget(process)

    def _stop_search(self) -> None:
        self._missing.clear()
        if self._search is not None:
            self._search.cancel()
            self._search = None

    def _find(self) -> None:
        self._search = None
        for pid in (pid for pid in _children() if pid not in PREPARED):
            if not self._missing:
                return
            self._look_at(pid)
        if self._missing:
            self._searches += 1
            delay = _SEARCH_SECONDS if self._searches < _SEARCHES_BEFORE_SLOW else _SLOW_SEARCH_SECONDS
            self._search = asyncio.get_running_loop().call_later(delay, self._find)

    def _look_at(self, pid: int) -> None:
        known = next((process for process in self._live.values() if process.pid == pid), None)
        if known is not None:
            known.threads.watch()
        else:
            self._examine(pid)

    def _examine(self, pid: int) -> None:
        """Start watching ``pid`` if it is a missing worker. Between fork and exec it cannot be identified yet."""
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:  # it has ended, or a worker reported a wrong pid
            return
        worker = _identify(pid)
        if worker is None or worker.agent != self._agent or worker.round != self._round:
            if worker is None and (how := _peek_exit(pidfd)) is not None:  # the environment of a dead process is empty
                self._unnamed[pid] = replace(how, pid=pid)
            os.close(pidfd)
            return
        self._missing.discard(worker.local_rank)
        threads = Threads(pid, lambda status: self._dies(process, status))
        process = WatchedProcess(
            worker=worker.worker, local_rank=worker.local_rank, pid=pid, pidfd=pidfd, threads=threads
        )
        self._live[worker.worker] = process
        threads.watch()
        asyncio.get_running_loop().add_reader(pidfd, self._ended, process, Exit(cause="exit", code=1))
        logger.info("worker_found worker=%s pid=%d", worker.worker, pid)
        self._on_found(process)

    def _ended(self, process: WatchedProcess, unknown: Exit) -> None:
        """Report an end; ``unknown`` is used if torchelastic's poll was faster and its status can't be found."""
        self._report(process, _peek_exit(process.pidfd) or _taken_exit(process.pid) or unknown)

    def _dies(self, process: WatchedProcess, status: int) -> None:
        """Report an end that is certain: no code of the program runs any more."""
        code = os.waitstatus_to_exitcode(status)
        self._report(process, Exit(cause="exit", code=code) if code >= 0 else Exit(cause="signal", code=-code))

    def _report(self, process: WatchedProcess, how: Exit) -> None:
        self._forget(process)
        if not how.is_clean:
            _kill_descendants(process.pid)
        self._on_exit(process.worker, replace(how, pid=process.pid))

    def _forget(self, process: WatchedProcess) -> None:
        asyncio.get_running_loop().remove_reader(process.pidfd)
        os.close(process.pidfd)
        process.threads.close()
        self._live.pop(process.worker, None)


def _children() -> list[int]:
    try:
        # Only the main thread's: torchelastic starts workers there, the embedded coordinator is started elsewhere.
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except FileNotFoundError:  # kernels without CONFIG_PROC_CHILDREN
        return [child.pid for child in psutil.Process().children()]


def _is_child(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).ppid() == os.getpid())
    except (psutil.NoSuchProcess, ValueError):  # ValueError: a worker reported what is no process id
        return False


def _identify(pid: int) -> environ.WorkerEnvironment | None:
    try:
        block = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    pairs = (entry.partition("=") for entry in os.fsdecode(block).split("\0") if "=" in entry)
    try:
        return environ.read({name: value for name, _, value in pairs})
    except (AgentUnavailable, ValueError):
        return None


def _peek_exit(pidfd: int) -> Exit | None:
    try:
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        return None
    if result is None:
        return None
    cause: Literal["exit", "signal"] = "exit" if result.si_code == os.CLD_EXITED else "signal"
    return Exit(cause=cause, code=result.si_status, dumped=result.si_code == os.CLD_DUMPED)


def _taken_exit(pid: int) -> Exit | None:
    """Return the status that torchelastic's poll has collected, from the handle that it keeps to itself.

    One end in a hundred needs this, on a busy machine. A clean exit must not be mistaken for a failure then.
    """
    handles = [
        item
        for item in gc.get_objects()
        if type(item) in (subprocess.Popen, ForkedWorker) and getattr(item, "pid", None) == pid
    ]
    deadline = time.monotonic() + _TAKING_SECONDS
    while handles and time.monotonic() < deadline:
        code = handles[-1].returncode
        if code is not None:
            return Exit(cause="exit", code=code) if code >= 0 else Exit(cause="signal", code=-code)
        time.sleep(0.001)
    return None


def _kill_descendants(pid: int) -> None:
    """Kill the processes that a failed worker leaves in its process group, e.g. data loaders that hold its memory."""
    if pid != os.getpgrp():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
