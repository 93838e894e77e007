"""Groups of processes that are stopped together, also if this process dies, and helpers to wait for them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

import psutil  # type: ignore[import-untyped]

from unicron_lightning import environ
from unicron_lightning.private_files import open_private

ProbedT = TypeVar("ProbedT")

MARK: Final = "UNICRON_LOCAL_CLUSTER"
"""Environment variable of every process of a group, with the group's identity; descendants inherit it."""
_FIRST_PORT, _LAST_PORT, _BLOCK = 20_000, 32_000, 16
_END_SECONDS: Final = 20.0
_RANDOM: Final = random.SystemRandom()
"""Two processes that seed the module `random` alike, as `seed_everything` does, would choose the same ports."""


def free_port() -> int:
    """Return a TCP port of the loopback address with free ports above it, below the range of outgoing connections."""
    while True:
        first = _RANDOM.randrange(_FIRST_PORT, _LAST_PORT)
        try:
            for port in range(first, first + _BLOCK):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first


def until(
    what: str, probe: Callable[[], ProbedT | None], seconds: float = 60.0, *, poll_seconds: float = 0.02
) -> ProbedT:
    """Wait until ``probe`` returns a true value, and return it.

    Raises:
        TimeoutError: it did not within ``seconds``; the message has ``what``.
    """
    deadline = time.monotonic() + seconds
    while not (found := probe()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        time.sleep(poll_seconds)
    return found


def kill(pid: int, number: int = signal.SIGKILL) -> bool:
    """Send a signal; return whether the process existed."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def lives(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def tied(module: str, *words: str) -> list[str]:
    """Return the command that runs a module in a process that ends with the present thread, by whatever cause."""
    return [sys.executable, "-m", "unicron_lightning.parent_death", str(os.getpid()), module, *words]


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """Make SIGTERM, as of a batch system, end this process like Ctrl-C: by an exception, so that it cleans up."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Processes:
    """Starts processes in sessions of their own, and finds and stops them with all their descendants.

    Args:
        folder: of their outputs, and their working directory if ``inside``.
        environment: variables of each beside those of this process, without those that an agent gives its workers.
        inside: whether they work in the folder, instead of this process's working directory.

    Attributes:
        folder: the folder.
        environment: all variables.
        started: the newest process of each name.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str], *, inside: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder.resolve()
        self.started: dict[str, subprocess.Popen[bytes]] = {}
        self._directory = self.folder if inside else None
        inherited = {name: value for name, value in os.environ.items() if name not in environ.FROM_AGENT}
        self.environment = {**inherited, **environment, MARK: uuid.uuid4().hex}
        self._replaced: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, command: Sequence[str | Path], **environment: str) -> subprocess.Popen[bytes]:
        """Start a process; its output is added to the file of `log`."""
        with open(self.log(name), "ab", opener=open_private) as output:
            process = subprocess.Popen(
                [str(word) for word in command],
                env={**self.environment, **environment},
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for this process, which stops the others in order
            )
        return self._has_started(name, process)

    def _has_started(self, name: str, process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        if name in self.started:
            self._replaced.append(self.started[name])
        self.started[name] = process
        return process

    def log(self, name: str) -> Path:
        """Return the path of a process's output."""
        return self.folder / f"{name}.log"

    def alive(self) -> list[psutil.Process]:
        """Return all processes that were started here, directly or not, and have not ended."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.environment[MARK] and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        known = {process.pid for process in found}
        for each in (*self.started.values(), *self._replaced):  # for a moment a new program's environment is empty
            with contextlib.suppress(psutil.Error):
                if each.pid not in known and each.poll() is None:
                    found.append(psutil.Process(each.pid))
        return found

    def stop(self, seconds: float = 3.0) -> None:
        """Send SIGTERM to the started processes, then to their descendants, and SIGKILL to all after ``seconds``."""
        if seconds > 0:
            for process in reversed(self.started.values()):
                if process.poll() is None:
                    process.terminate()
                    process.send_signal(signal.SIGCONT)  # it may be stopped
            with contextlib.suppress(TimeoutError):
                until("the end of all started processes", self._ended, seconds)
                for orphan in self.alive():
                    kill(orphan.pid, signal.SIGTERM)
                until("the end of all processes", lambda: not self.alive(), seconds)
        until("the end of all processes", self._killed, _END_SECONDS)
        for process in (*self.started.values(), *self._replaced):
            process.wait(_END_SECONDS)

    def _ended(self) -> bool:
        return all(process.poll() is not None for process in self.started.values())

    def _killed(self) -> bool:
        """Send SIGKILL to all processes; return whether there were none. Those found may just have started others."""
        found = self.alive()
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        return not found
