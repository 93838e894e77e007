"""Notifies the agent at once that its process was asked to end, without touching torchelastic's signal handlers.

torchelastic's handler raises in the main thread and stops the workers from there. Before it is installed, while the
first grant is awaited, a SIGTERM would end the process without any clean-up, so another handler is installed for that
time. During the clean-up, a signal would interrupt it, so signals are held back.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final

_ENDING: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})


class SignalWatch:
    """Calls back from its thread when a signal that ends torchrun arrives. Created and closed in the main thread.

    Python's wake-up descriptor gets each signal's number before any handler runs. If it is in use elsewhere, or this is
    not the main thread, nothing is watched.
    """

    def __init__(self, on_ending: Callable[[], None]) -> None:
        self._on_ending = on_ending
        self._thread: threading.Thread | None = None
        if threading.current_thread() is not threading.main_thread():
            return
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        previous = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        if previous != -1:
            signal.set_wakeup_fd(previous)
            self._close_sockets()
            return
        self._thread = threading.Thread(target=self._watch, name="unicron-signals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        if self._thread is None:
            return
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
        self._write.close()
        self._thread.join()
        self._thread = None
        self._close_sockets()

    def _watch(self) -> None:
        while numbers := self._read.recv(64):
            if any(number in _ENDING for number in numbers):
                self._on_ending()

    def _close_sockets(self) -> None:
        self._read.close()
        self._write.close()


@contextlib.contextmanager
def clean_exit_on_sigterm() -> Iterator[None]:
    """Make SIGTERM end the process by `SystemExit`, so that it cleans up, while no handler is installed yet."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def held_signals() -> Iterator[None]:
    """Hold back the signals that end a torchrun until the block ends; the first one then takes effect."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []

    def hold(number: int, _frame: FrameType | None) -> None:
        arrived.append(number)

    before = {number: signal.signal(number, hold) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if arrived:
            signal.raise_signal(arrived[0])


def _exit(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
