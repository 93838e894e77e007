"""The notification hook: a command of the operator's that is run for selected events, one process after the other.

The command gets the event as one line of JSON on its standard input, with the keys of `store.LoggedEvent` but ``seq``,
and its name and task in variables. It decides nothing: the coordinator does not wait for it, and a command that fails
or takes too long is logged. Text of events comes from scripts and nodes, so it is never part of the command line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, Final

from unicron_lightning import environ
from unicron_lightning.coordinator import events as ev
from unicron_lightning.wire.fields import shortened

logger = logging.getLogger(__name__)

_MOST_WAITING: Final = 1000
_LAST_SECONDS: Final = 5.0
"""Time for the waiting events when the coordinator stops."""


class Hook:
    """The hook of one coordinator.

    Args:
        command: program and arguments; nothing is run if it is empty.
        events: names of the events.
        seconds: time for one process, which is then killed.
    """

    def __init__(self, command: Sequence[str], events: Collection[str], seconds: float) -> None:
        self._command, self._events, self._seconds = command, frozenset(events if command else ()), seconds
        self._waiting: deque[dict[str, Any]] = deque()
        self._running: asyncio.Task[None] | None = None
        self._dropped = 0

    def note(self, event: ev.Emit) -> None:
        """Take an event; with too many waiting ones the oldest is dropped."""
        if event.name not in self._events:
            return
        if len(self._waiting) >= _MOST_WAITING:
            self._waiting.popleft()
            self._dropped += 1
        about = {"name": event.name, "task": event.task, "incident": event.incident, "fields": event.fields}
        self._waiting.append({"at": time.time(), **about})
        if self._running is None or self._running.done():
            self._running = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Give the waiting events a last chance, then kill the process that runs."""
        if self._running is not None:
            await asyncio.wait({self._running}, timeout=_LAST_SECONDS)
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _run(self) -> None:
        while self._waiting:
            if self._dropped:
                logger.warning("hook_events_dropped number=%d: the command is slower than the events", self._dropped)
                self._dropped = 0
            event = self._waiting.popleft()
            try:
                failed = await self._call(event)
            except OSError as error:
                failed = f"{error.strerror or error}"
            if failed:
                logger.warning("hook_failed command=%s event=%s: %s", shortened(self._command), event["name"], failed)

    async def _call(self, event: dict[str, Any]) -> str | None:
        """Run the command for an event; return how it failed, or None."""
        environment = {name: value for name, value in os.environ.items() if name != environ.TOKEN}
        environment |= {"UNICRON_EVENT": event["name"], environ.TASK: event["task"] or ""}
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it need not read
                await asyncio.wait_for(process.communicate(json.dumps(event).encode() + b"\n"), self._seconds)
            return None if process.returncode == 0 else f"status {process.returncode}"
        except asyncio.TimeoutError:
            return f"killed after {self._seconds:g} s"
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
