"""Signals that end a torchrun, before, around and in place of torchelastic's handlers.

torchelastic's handler raises in the main thread and stops the workers from there, in the middle of a step; the agent is
notified at once (`SignalWatch`). The first SIGTERM (a preemption by Kubernetes, Slurm or a cloud), SIGINT (Ctrl-C) or
SIGHUP does not get there: the workers leave at a step boundary first (`Departure`). Before torchelastic's handlers are
installed, while the first grant is awaited, a SIGTERM would end the process without any clean-up, so another handler is
installed for that time. During the clean-up, a signal would interrupt it, so signals are held back.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final

logger = logging.getLogger(__name__)

_POLITE: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_ENDING: Final = _POLITE | {signal.SIGQUIT}


class SignalWatch:
    """Calls back from its thread when a signal arrives that ends torchrun now. Created and closed in the main thread.

    Python's wake-up descriptor gets each signal's number before any handler runs. If it is in use elsewhere, or this is
    not the main thread, nothing is watched.
    """

    def __init__(self, on_ending: Callable[[], None], departure: Departure) -> None:
        self._on_ending = on_ending
        self._departure = departure
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
            if any(number in _ENDING and not self._departure.handles(number) for number in numbers):
                self._on_ending()

    def _close_sockets(self) -> None:
        self._read.close()
        self._write.close()


class Departure:
    """Answers the first signal by a request that the workers leave; passes later ones on to torchelastic's handler.

    For the main thread, except `handles`.

    Attributes:
        begun: number of that signal, once it has arrived; else 0.

    Args:
        possible: whether workers run that can leave in order.
        ask: requests that they leave; called in a signal handler.
        end_now: prepares for the end of the workers in the middle of a step.
        seconds: time that they get.
    """

    def __init__(
        self, possible: Callable[[], bool], ask: Callable[[], None], end_now: Callable[[], None], seconds: float
    ) -> None:
        self.begun = 0
        self._possible, self._ask, self._end_now = possible, ask, end_now
        self._seconds = seconds
        self._deadline = 0.0
        self._usual: dict[int, Any] = {}

    def handles(self, number: int) -> bool:
        """[any thread] Whether such a signal that arrives now is handled here."""
        return number in self._usual

    def review(self) -> None:
        """Take over signals from handlers that were installed since the last call; end an overdue departure.

        Raises:
            SignalException: torchelastic's, if the workers have not left in time.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _POLITE:
            installed = signal.getsignal(number)
            if callable(installed) and installed not in (self._handle, signal.default_int_handler):
                self._usual[number] = installed
                signal.signal(number, self._handle)
        if self.begun and time.monotonic() > self._deadline:
            logger.warning(
                "departure_overdue seconds=%g: the workers are stopped in the middle of a step", self._seconds
            )
            self._pass_on(self.begun, None)

    def close(self) -> None:
        """Give the signals back to torchelastic's handlers."""
        if threading.current_thread() is threading.main_thread():
            for number, usual in self._usual.items():
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, usual)
            self._usual = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.begun or not self._possible():
            self._pass_on(number, frame)
            return
        self.begun = number
        self._deadline = time.monotonic() + self._seconds
        self._ask()
        logger.warning(
            "agent_departs signal=%s seconds=%g: its workers leave after this step; a second signal stops them at once",
            signal.Signals(number).name,
            self._seconds,
        )

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._end_now()
        self._usual[number](number, frame)


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
