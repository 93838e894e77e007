"""Requests to leave a node that are no SIGTERM: another signal, or a file. Each becomes one SIGTERM of this process.

Schedulers send the signal of their configuration, e.g. SIGUSR1. A hook that announces the end of a spot instance can
create a file.
"""

from __future__ import annotations

import logging
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any, Final

from unicron_lightning.errors import ConfigError

logger = logging.getLogger(__name__)

SIGNALS: Final = {"SIGUSR1": signal.SIGUSR1, "SIGUSR2": signal.SIGUSR2}
_POLL_SECONDS: Final = 0.5


def leave_signal(text: str | None, option: str) -> signal.Signals | None:
    """Return the signal that a user has named, with or without "SIG"; None if there is none.

    Args:
        text: as given.
        option: its name, for the error.

    Raises:
        ConfigError: it is another signal.
    """
    if text in (None, ""):
        return None
    name = str(text).upper()
    found = SIGNALS.get(name if name.startswith("SIG") else f"SIG{name}")
    if found is None:
        raise ConfigError(f"{option}{text}: expected USR1 or USR2")
    return found


class LeaveNotices:
    """Sends this process SIGTERM when a signal arrives, or when a file appears. Created and closed in the main thread;
    does nothing in another one.

    Args:
        number: the signal, None: none.
        path: the file, looked for twice a second; None: none.
    """

    def __init__(self, number: signal.Signals | None, path: Path | None) -> None:
        self._number, self._path = number, path
        self._before: Any = None
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        if threading.current_thread() is not threading.main_thread():
            return
        if number is not None:
            self._before = signal.signal(number, self._handle)
        if path is not None:
            self._thread = threading.Thread(target=self._watch, args=(path,), name="unicron-notice", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop watching; the signal gets its previous handler."""
        if self._before is not None and self._number is not None:
            signal.signal(self._number, self._before)
            self._before = None
        if self._thread is not None:
            self._closed.set()
            self._thread.join(_POLL_SECONDS)  # longer if its file system hangs
            self._thread = None

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        logger.warning("leave_notice signal=%s", signal.Signals(number).name)
        signal.raise_signal(signal.SIGTERM)

    def _watch(self, path: Path) -> None:
        while not path.exists():
            if self._closed.wait(_POLL_SECONDS):
                return
        logger.warning("leave_notice file=%s", path)
        main = threading.main_thread().ident
        if main is not None and not self._closed.is_set():
            signal.pthread_kill(main, signal.SIGTERM)
