"""Shared memory without a name in any file system: one process fills it, others of the same user keep and read it.

It exists until the last process that holds it open has closed it or ended, so none is ever left behind. A process that
keeps or reads it holds a shared lock (``flock``), so that its owner knows when the memory may be filled again.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
from typing import Final

import numpy as np
from typing_extensions import Buffer

from unicron_lightning import wire

NAME: Final = "unicron-state"
"""Name of the memory in /proc: for people, and for the check of what is opened."""
_ROW: Final = 1 << 10
"""Words of 8 bytes in a row of `digest_of`."""
_ROWS: Final = 32
"""Rows that are summed at a time: they fit the processor's cache, and are read from memory once."""


def allocate(size: int) -> tuple[int, mmap.mmap]:
    """Return memory of this size, allocated at once: later there would be a signal instead of an error.

    Raises:
        OSError: there is not enough.
    """
    descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC)
    try:
        os.fchmod(descriptor, 0o600)
        os.posix_fallocate(descriptor, 0, size)
        return descriptor, mmap.mmap(descriptor, size)
    except (OSError, ValueError):
        os.close(descriptor)
        raise


def in_use(descriptor: int) -> bool:
    """Whether another process keeps or reads this process's memory."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def opened(pid: int, each: wire.OpenCopy) -> int:
    """Open a copy that another process of this user holds open; return a descriptor, with a shared lock.

    Raises:
        OSError: it is not there, or is no memory of at least the stated size.
    """
    path = f"/proc/{pid}/fd/{each.descriptor}"
    found = os.readlink(path)
    if not found.startswith(f"/memfd:{NAME} "):
        raise OSError(f"{path} is {found}, expected memory named {NAME}")
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if (size := os.fstat(descriptor).st_size) < each.copy.size:
            raise OSError(f"{path} has {size} bytes, expected {each.copy.size}")
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def verified(pid: int, each: wire.OpenCopy) -> bytes:
    """Return the bytes of a copy that another process holds open.

    Raises:
        OSError: as `opened`, or its bytes are not those that were staged.
    """
    descriptor = opened(pid, each)
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(each.copy.size)
    if (digest := digest_of(data)) != each.copy.digest:
        raise OSError(f"part {each.copy.part} has the digest {digest}, expected {each.copy.digest}")
    return data


def digest_of(data: Buffer) -> str:
    """Return a digest that reveals accidental changes, in hexadecimal digits, at an eighth of SHA-256's cost.

    It is the SHA-256 of the sums of all rows and columns of the words, modulo 2**64: changes are missed only if they
    cancel in each row and in each column. It is no protection from deliberate ones: this user could write both.
    """
    memory = memoryview(data).cast("B")
    end = len(memory) - len(memory) % (8 * _ROW)
    rows = np.frombuffer(memory[:end], dtype=np.uint64).reshape(-1, _ROW)
    columns, digest = np.zeros(_ROW, dtype=np.uint64), hashlib.sha256(len(memory).to_bytes(8, "little"))
    for first in range(0, len(rows), _ROWS):
        block = rows[first : first + _ROWS]
        digest.update(block.sum(axis=1).tobytes())
        columns += block.sum(axis=0)
    digest.update(columns.tobytes())
    digest.update(memory[end:])
    return digest.hexdigest()
