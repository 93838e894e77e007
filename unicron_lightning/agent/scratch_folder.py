"""The agent's private folder, which contains its UNIX socket. Later agents remove the folders of killed agents."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from unicron_lightning.errors import ConfigError
from unicron_lightning.private_files import make_private, user_path

_LOCK: Final = "lock"
_PREFIX: Final = "agent-"
_MOST_BYTES: Final = 107 - len(f"/{_PREFIX}12345678/socket")
"""Longest path of the folder's parent: the kernel allows 107 bytes for that of a UNIX socket."""


class ScratchFolder:
    """A folder of mode 0700 that exists until `close`; a lock in it shows others that it is in use.

    Raises:
        ConfigError: the path of the folder for temporary files is too long.
    """

    def __init__(self) -> None:
        if len(os.fsencode(user_path())) > _MOST_BYTES:
            raise ConfigError(
                f"TMPDIR={user_path().parent}: too long for a socket in {user_path().name}/; expected at most "
                f"{_MOST_BYTES - len(user_path().name) - 1} bytes"
            )
        parent = make_private(user_path())
        sweep(parent)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            lock = self.path / _LOCK
            self._lock = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if lock.exists():  # otherwise another agent removed it before it was locked
                return
            os.close(self._lock)

    def close(self) -> None:
        """Remove the folder."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def sweep(parent: Path) -> None:
    """Remove the folders of agents that no longer live."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
