"""The last guard against two tasks on the same accelerators: a lock on this machine, held while a slot has workers.

The coordinator grants a place to one agent at a time, according to its knowledge. An agent that it has declared lost
may only be cut off or stopped, while its workers live on. So the agents of a slot also exclude each other on their
machine: the kernel releases the lock when its holder's process ends, by whatever cause, and its workers end with it.
"""

from __future__ import annotations

import fcntl
import os
import urllib.parse
from pathlib import Path

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
