"""Files that only their owner may read, whatever the mode of their folder and the process's umask."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

MODE: Final = 0o600


def open_private(path: str | Path, flags: int) -> int:
    """Open a file, created with mode 0600 if it does not exist; a symlink is not followed.

    An existing file of this user that others may read or write is given mode 0600.

    Args:
        path: the file.
        flags: of ``os.open``; O_CREAT, O_CLOEXEC and O_NOFOLLOW are added.

    Returns:
        A descriptor, closed by the caller. Usable as ``opener`` of ``open``.

    Raises:
        OSError: the file cannot be opened, e.g. because it is a symlink (ELOOP).
    """
    descriptor = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, MODE)
    try:
        found = os.fstat(descriptor)
        if found.st_uid == os.getuid() and stat.S_ISREG(found.st_mode) and found.st_mode & 0o077:
            os.fchmod(descriptor, MODE)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
