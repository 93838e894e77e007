"""Shared memory without a name in any file system: one process fills it, another one of the same user keeps it.

It exists until the last process that holds it open has closed it or ended, so none is ever left behind.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from typing import Final

from unicron_lightning import wire

NAME: Final = "unicron-state"
"""Name of the memory in /proc: for people, and for the check of what is opened."""


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


def opened(pid: int, each: wire.OpenCopy) -> int:
    """Open a copy that another process of this user holds open; return a descriptor.

    Raises:
        OSError: it is not there, or is no memory of the stated size.
    """
    path = f"/proc/{pid}/fd/{each.descriptor}"
    found = os.readlink(path)
    if not found.startswith(f"/memfd:{NAME} "):
        raise OSError(f"{path} is {found}, expected memory named {NAME}")
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if (size := os.fstat(descriptor).st_size) != each.copy.size:
        os.close(descriptor)
        raise OSError(f"{path} has {size} bytes, expected {each.copy.size}")
    return descriptor


def verified(pid: int, each: wire.OpenCopy) -> bytes:
    """Return the bytes of a copy that another process holds open.

    Raises:
        OSError: as `opened`, or its bytes are not those that were staged.
    """
    descriptor = opened(pid, each)
    with os.fdopen(descriptor, "rb") as file:
        data = file.read()
    if (digest := hashlib.sha256(data).hexdigest()) != each.copy.digest:
        raise OSError(f"part {each.copy.part} has the digest {digest}, expected {each.copy.digest}")
    return data
