"""Shared memory that is filled again and again: new memory costs several times as much time as a copy into it.

Its user takes memory for a version, hands it to another process, and gives it back when that process needs it no more.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import psutil  # type: ignore[import-untyped]
import torch

from unicron_lightning.shared_memory import allocate

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
