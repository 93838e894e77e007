"""Writes the machine's decisions to the store, and keeps unwritten ones until a write succeeds.

While the disk is full, recovery continues without durable state: agents could rebuild what the coordinator then loses.
An operator's order could not be rebuilt, so it is confirmed only after its write. Nor could the end of a job: daemons
forget it after its write.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable
from typing import Final

from unicron_lightning.coordinator.machine import Machine
from unicron_lightning.coordinator.storage.batch import Batch
from unicron_lightning.coordinator.storage.store import Store

logger = logging.getLogger(__name__)

FIRST_RETRY_SECONDS: Final = 0.5
LAST_RETRY_SECONDS: Final = 5.0


class Saving:
    """Writes batches to the store, in order.

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
