"""The last guard against two tasks on the same accelerators: a lock on this machine, held while a slot has workers.

The coordinator grants a place to one agent at a time, according to its knowledge. An agent that it has declared lost
may only be cut off or stopped, while its workers live on. So the agents of a slot also exclude each other on their
machine: the kernel releases the lock when its holder's process ends, by whatever cause, and its workers end with it.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Final

from unicron_lightning import wire
from unicron_lightning.private_files import make_private, open_private, user_path


class SlotLock:
    """The lock of one labelled slot of one node.

    Args:
        node: the node's label.
        slot: the slot's label.
        folder: folder of this machine's locks; default: one of this user, in the folder for temporary files.
    """

    def __init__(self, node: str, slot: str, folder: Path | None = None) -> None:
        home = user_path() / "slots" if folder is None else folder
        self._path = home / f"{urllib.parse.quote(f'{node}/{slot}', safe='')}.lock"
        self._file: int | None = None

    def acquire(self) -> bool:
        """Acquire the lock if it is free; return whether it is held now."""
        if self._file is not None:
            return True
        make_private(self._path.parent)
        file = open_private(self._path, os.O_RDWR)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        os.ftruncate(file, 0)
        os.write(file, f"{os.getpid()}\n".encode())
        self._file = file
        return True

    def holder(self) -> str:
        """Return the holder's process id according to the file, for messages."""
        try:
            return self._path.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            return ""

    def release(self) -> None:
        """Release the lock, if it is held."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


logger = logging.getLogger(__name__)

RETRY_SECONDS: Final = 0.05


class SlotGate:
    """Holds back an agent's workers until the slot's accelerators are also free on this machine.

    Workers of an ordinary grant are started under the slot's lock. Warm ones run without it: their welcome, after which
    they use the accelerator, waits here until the lock is acquired. The lock is released when the next round begins.
    Lives in the agent's event loop.

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
