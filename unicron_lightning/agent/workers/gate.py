"""Holds back an agent's workers until the slot's accelerators are also free on this machine.

Workers of an ordinary grant are started under the slot's lock. Warm ones run without it: their welcome, after which
they use the accelerator, waits here until the lock is acquired. The lock is released when the next round begins.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from unicron_lightning import wire
from unicron_lightning.agent.workers.slot_lock import SlotLock

logger = logging.getLogger(__name__)

RETRY_SECONDS: Final = 0.05


class SlotGate:
    """Gate of one agent; lives in its event loop.

    Args:
        lock: lock of the slot; None if no other task uses its accelerators.
        goes_on: whether a worker is live and not about to be stopped.
        send: sends to a worker.
    """

    def __init__(
        self, lock: SlotLock | None, goes_on: Callable[[str], bool], send: Callable[[str, wire.ToWorker], object]
    ) -> None:
        self._lock = lock
        self._goes_on = goes_on
        self._send = send
        self._held: dict[str, wire.Welcome] = {}
        self._retry: asyncio.TimerHandle | None = None

    def begin_round(self) -> None:
        """Release the slot: the workers of the previous round are stopped."""
        self.close()
        if self._lock is not None:
            self._lock.release()

    def welcome(self, message: wire.Welcome) -> None:
        """Pass a welcome on, now or when the slot is free."""
        self._held[message.worker] = message
        self._review()

    def close(self) -> None:
        """Drop the held messages."""
        self._held.clear()
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    def _review(self) -> None:
        self._held = {worker: word for worker, word in self._held.items() if self._goes_on(worker)}
        if not self._held:
            return
        if self._lock is None or self._lock.acquire():
            held, self._held = self._held, {}
            for worker, word in held.items():
                self._send(worker, word)
        elif self._retry is None:
            logger.warning("slot_in_use pid=%s held=%s", self._lock.holder(), sorted(self._held))
            self._retry = asyncio.get_running_loop().call_later(RETRY_SECONDS, self._again)

    def _again(self) -> None:
        self._retry = None
        self._review()
