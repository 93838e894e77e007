"""Decisions of the machine that are not carried out yet, of one input or of several that arrived together.

A batch is written as one transaction, then sent. A message for many recipients is encoded once.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Container, Iterator
from typing import Final

import msgspec

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.machine import Machine
from unicron_lightning.coordinator.server.session import frame_of
from unicron_lightning.coordinator.storage.store import Store

logger = logging.getLogger(__name__)

MOST_UNWRITTEN_EVENTS: Final = 10_000
"""Newest events that are kept in memory while nothing can be written."""
MOST_LOGGED_CHARACTERS: Final = 4096
"""Limit of an event's fields in the process's log, which a script could otherwise fill."""


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

    def write(self, store: Store, machine: Machine) -> bool:
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
        store: Store,
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
