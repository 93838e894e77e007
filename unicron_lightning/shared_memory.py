"""Shared memory without a name in any file system: one process fills it, others of the same user keep and read it.

It exists until the last process that holds it open has closed it or ended, so none is ever left behind. A process that
keeps or reads it holds a shared lock (``flock``), so that its owner knows when the memory may be filled again. A
descriptor that is sent to another process has the lock from the beginning, and keeps the memory while it is under way.

Memory is filled again and again: new memory costs several times as much time as a copy into it. Its user takes memory
for a version, hands it to another process, and gives it back when that process needs it no more.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import psutil  # type: ignore[import-untyped]
import torch
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


def opened(pid: int | str, number: int, size: int) -> int:
    """Open memory that a process of this user holds open; return a descriptor to read it, with a shared lock.

    Args:
        pid: the process; "self" for this one.
        number: its descriptor there.
        size: bytes that are to be read.

    Raises:
        OSError: it is not there, or is no memory of at least this size.
    """
    check(pid, number, size)
    descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def check(pid: int | str, number: int, size: int) -> None:
    """Check that a process holds such memory under a descriptor.

    Raises:
        OSError: it is not there, or is no memory of at least this size.
    """
    path = f"/proc/{pid}/fd/{number}"
    if not (found := os.readlink(path)).startswith(f"/memfd:{NAME} "):
        raise OSError(f"{path} is {found}, expected memory named {NAME}")
    if (there := Path(path).stat().st_size) < size:
        raise OSError(f"{path} has {there} bytes, expected {size}")


def verified(pid: int, each: wire.OpenCopy) -> bytes:
    """Return the bytes of a copy that another process holds open.

    Raises:
        OSError: as `opened`, or its bytes are not those that were staged.
    """
    descriptor = opened(pid, each.descriptor, each.copy.size)
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


_GRAIN: Final = 1 << 16
"""Bytes: sizes are multiples of it, because the size of a part changes a little from version to version."""
_IDLE: Final = 4
"""Further versions after which memory that is not taken again is released."""


@dataclass(frozen=True, eq=False)
class PooledMemory:
    """Shared memory without a name.

    Attributes:
        descriptor: for processes that open it.
        content: at least as large as was asked for.
    """

    descriptor: int
    content: mmap.mmap

    def view(self, size: int) -> torch.Tensor:
        """Return the first bytes; uint8 of shape ``(size,)``."""
        return torch.frombuffer(self.content, dtype=torch.uint8, count=size)

    def release(self) -> None:
        """Return the memory to the system once no process holds it."""
        os.close(self.descriptor)


class MemoryPool:
    """Memory of one user; its methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[PooledMemory, int] = {}
        """Since which version."""
        self._version = 0

    def take(self, sizes: Sequence[int]) -> list[PooledMemory]:
        """Return memory for a version with parts of these sizes, in bytes.

        Raises:
            OSError: there is not enough.
            MemoryError: it would take more than half of the machine's free memory.
        """
        with self._lock:
            self._version += 1
            found = [self._fitting(size) for size in sizes]
            for memory in [each for each, since in self._free.items() if self._version - since > _IDLE]:
                del self._free[memory]
                memory.release()
        needed = sum(size for size, memory in zip(sizes, found, strict=True) if memory is None)
        available = psutil.virtual_memory().available
        try:
            if needed > available // 2:
                raise MemoryError(f"the copy needs {needed} bytes, more than half of the {available} that are free")
            for place, size in enumerate(sizes):
                if found[place] is None:
                    found[place] = PooledMemory(*allocate((size // _GRAIN + 1) * _GRAIN))
        except (OSError, MemoryError):
            self.give_back(memory for memory in found if memory is not None)
            raise
        return [memory for memory in found if memory is not None]

    def give_back(self, memories: Iterable[PooledMemory]) -> None:
        """Take memory back that no process reads any more."""
        with self._lock:
            self._free.update(dict.fromkeys(memories, self._version))

    def close(self) -> None:
        """Release what has been given back."""
        with self._lock:
            for memory in self._free:
                memory.release()
            self._free.clear()

    def _fitting(self, size: int) -> PooledMemory | None:
        """Remove from the free memory one that fits, if there is any."""
        fits = next((memory for memory in self._free if 0 <= len(memory.content) - size < 2 * _GRAIN), None)
        if fits is not None:
            del self._free[fits]
        return fits
