"""Decisions of the machine that are not carried out yet, of one input or of several that arrived together.

A batch is written as one transaction, then sent. A message for many recipients is encoded once.

The notification hook: a command of the operator's that is run for selected events, one process after the other.

The command gets the event as one line of JSON on its standard input, with the keys of `storage.LoggedEvent` but
``seq``, and its name and task in variables. It decides nothing: the coordinator does not wait for it, and a command
that fails or takes too long is logged. Text of events comes from scripts and nodes, so it is never part of the command
line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from typing import Any, Final

import msgspec

from unicron_lightning import environ, wire
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.machine import Machine
from unicron_lightning.coordinator.server.peers import frame_of
from unicron_lightning.coordinator.storage import Database
from unicron_lightning.wire.daemon import NodeRun
from unicron_lightning.wire.fields import shortened

logger = logging.getLogger(__name__)


MOST_UNWRITTEN_EVENTS: Final = 10_000
"""Newest events that are kept in memory while nothing can be written."""
MOST_LOGGED_CHARACTERS: Final = 4096
"""Limit of an event's fields in the process's log, which a script could otherwise fill."""


_WITHOUT_EFFECT: Final = (ev.Save, ev.SaveLasting, ev.Forget, ev.SetTimer, ev.CancelTimer)
"""Actions that are over once they are decided and written."""


class Batch:
    """Answers of the machine, in order."""

    def __init__(self) -> None:
        self._decided: list[tuple[float, list[ev.Action]]] = []
        self._frames: dict[int, bytes] = {}
        """Encoded messages by the messages' identities; ``_decided`` keeps the messages alive."""
        self._changed: set[str] = set()
        self._gone: set[str] = set()
        self._lasting = False
        self._news: list[tuple[float, ev.Emit]] = []

    def add(self, now: float, actions: list[ev.Action]) -> None:
        """Add an answer given at time.time() ``now``."""
        self._decided.append((now, actions))
        for action in actions:
            match action:
                case ev.Save(task=task):
                    self._changed.add(task)
                case ev.Forget(task=task):
                    self._gone.add(task)
                case ev.SaveLasting():
                    self._lasting = True
                case ev.Emit():
                    self._news.append((now, action))
                    text = str(action.fields)
                    if len(text) > MOST_LOGGED_CHARACTERS:
                        text = f"{text[:MOST_LOGGED_CHARACTERS]}... (cut, {len(text)} characters)"
                    logger.info("%s task=%s incident=%s %s", action.name, action.task, action.incident, text)

    def withhold(self, tasks: Container[str], conns: Container[int]) -> None:
        """Discard changes of these tasks and messages for these connections, because the tasks are set back."""

        def stays(action: ev.Action) -> bool:
            return not (isinstance(action, ev.Send) and action.conn in conns)

        self._decided = [(now, [each for each in actions if stays(each)]) for now, actions in self._decided]
        self._changed = {task for task in self._changed if task not in tasks}
        self._gone = {task for task in self._gone if task not in tasks}

    def unwritten(self) -> Batch:
        """Return the part that has to be written, without the messages."""
        rest = Batch()
        rest.follow(self)
        return rest

    def follow(self, later: Batch) -> None:
        """Merge what a later batch writes into this one; drop its messages."""
        self._changed |= later._changed
        self._gone |= later._gone
        self._lasting |= later._lasting
        self._news += later._news
        del self._news[:-MOST_UNWRITTEN_EVENTS]

    def actions(self) -> Iterator[ev.Action]:
        """Iterate over all actions."""
        for _, actions in self._decided:
            yield from actions

    def frame(self, message: msgspec.Struct) -> bytes:
        """Return a message of this batch as a frame of the connection."""
        frame = self._frames.get(id(message))
        if frame is None:
            frame = self._frames[id(message)] = frame_of(wire.encode(message))
        return frame

    def acts(self) -> bool:
        """Whether anything follows once the batch is written."""
        return any(not isinstance(action, _WITHOUT_EFFECT) for action in self.actions())

    def encode(self) -> None:
        """Encode the messages now: the machine goes on, and what they refer to may change before they are sent."""
        for action in self.actions():
            if isinstance(action, ev.Send) and not isinstance(action.message, NodeRun):  # replaced when it is sent
                self.frame(action.message)

    def write(self, store: Database, machine: Machine) -> bool:
        """Write the batch in one transaction; return whether there was anything to write.

        ``machine`` is in its state after the last answer.

        Raises:
            sqlite3.Error: e.g. the disk is full.
        """
        news, lasting = self._news, machine.lasting if self._lasting else None
        save = [machine.tasks[task] for task in sorted(self._changed) if task in machine.tasks]
        forget = sorted(task for task in self._gone if task not in machine.tasks)
        if not (save or forget or news or lasting):
            return False
        store.write(save=save, forget=forget, events=news, lasting=lasting)
        return True


FIRST_RETRY_SECONDS: Final = 0.5
LAST_RETRY_SECONDS: Final = 5.0


class Saving:
    """Writes the machine's decisions to the store, in order, and keeps unwritten ones until a write succeeds.

    While the disk is full, recovery continues without durable state: agents could rebuild what the coordinator then
    loses. An operator's order could not be rebuilt, so it is confirmed only after its write. Nor could the end of a
    job: daemons forget it after its write.

    Args:
        store: the destination.
        machine: returns the machine whose state is written.
        written: called when all is written again after a failure.
        timed: called with the seconds of each write.
    """

    def __init__(
        self,
        store: Database,
        machine: Callable[[], Machine],
        written: Callable[[], None] = lambda: None,
        timed: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._store = store
        self._machine = machine
        self._written = written
        self._timed = timed
        self._unwritten: Batch | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._seconds = FIRST_RETRY_SECONDS
        self.error: str | None = None
        """Reason why the last write failed; None if all is written."""

    def write(self, batch: Batch) -> None:
        """Write a batch; while an older one is unwritten, keep it for the next try."""
        if self._unwritten is None:
            self._try(batch)
        else:
            self._unwritten.follow(batch)

    def retry(self) -> bool:
        """Retry writing the kept batch now; return whether all is written."""
        if self._unwritten is not None:
            self._try(self._unwritten)
        return self._unwritten is None

    def close(self, *, last_try: bool) -> None:
        """Stop retrying, after a last try if requested."""
        if last_try:
            self.retry()
        self._cancel()

    def _try(self, batch: Batch) -> None:
        self._cancel()
        began = time.perf_counter()
        try:
            if batch.write(self._store, self._machine()):
                self._timed(time.perf_counter() - began)
        except sqlite3.Error as error:
            self.error = str(error) or repr(error)
            logger.error("state_not_saved error=%s retry_seconds=%g", self.error, self._seconds)
            self._unwritten = batch.unwritten()
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self.retry)
            self._seconds = min(2 * self._seconds, LAST_RETRY_SECONDS)
            return
        failed_before = self.error is not None
        self.error, self._unwritten, self._seconds = None, None, FIRST_RETRY_SECONDS
        if failed_before:
            logger.info("state_saved_again")
            self._written()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


_SECRETS: Final = (environ.TOKEN, environ.ETCD_PASSWORD)
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
        environment = {name: value for name, value in os.environ.items() if name not in _SECRETS}
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
