"""Calls from one thread into an event loop that runs in another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, Final

_LOOK_SECONDS: Final = 0.2


def call(loop: asyncio.AbstractEventLoop, thread: threading.Thread, function: Callable[..., None], *args: Any) -> None:
    """Run a function in the loop and wait until it has run, or until the loop has ended.

    Args:
        loop: the event loop.
        thread: the thread that runs the loop.
        function: the function.
        args: its arguments.
    """
    done = threading.Event()

    def run() -> None:
        try:
            function(*args)
        finally:
            done.set()

    try:
        loop.call_soon_threadsafe(run)
    except RuntimeError:  # the loop is closed
        return
    while thread.is_alive() and not done.wait(_LOOK_SECONDS):
        pass
