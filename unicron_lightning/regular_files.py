"""Opens files at paths that others choose: a pipe there would block its reader for ever, and a device has no end."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import AbstractContextManager
from typing import IO


def open_regular(path: str | os.PathLike[str], flags: int) -> int:
    """Open a regular file; usable as ``opener`` of ``open``.

    Args:
        path: the file; symbolic links are followed.
        flags: of ``os.open``; O_CLOEXEC and O_NONBLOCK, which has no effect on a regular file, are added.

    Returns:
        A descriptor, closed by the caller.

    Raises:
        OSError: it cannot be opened, or is a pipe, a device, a socket or a folder.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no regular file", os.fspath(path))
    return descriptor


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: as `open_regular`.
    """
    with open(path, "rb", opener=open_regular) as file:
        return file.read()


def open_stored(path: str | os.PathLike[str]) -> AbstractContextManager[IO[bytes]]:
    """Open a regular file, or what is at a URL for which fsspec has a package, for reading.

    Raises:
        OSError: as `open_regular`.
    """
    if "://" not in str(path):
        return open(path, "rb", opener=open_regular)
    import fsspec  # type: ignore[import-untyped]  # for URLs only

    found: AbstractContextManager[IO[bytes]] = fsspec.open(str(path), "rb")
    return found
