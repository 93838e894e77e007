"""Marks in host memory that a device sets when a collective has ended: looking at one is no call of the driver.

The driver answers queries behind its own locks. A ``cudaFree`` in another thread waits for all kernels, so also for the
reduction of a dead peer, and a query then waits with it, while torch holds the interpreter's lock: no thread of Python
could abort the reduction. Starting a collective calls the driver, too, but torch gives the lock back in these calls.

Marks are used again and never freed, since torch calls the driver where it frees pinned memory.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, Final

import torch

NUMBER: Final = 1 << 12
"""Marks of one group: more than collectives that can be under way."""

_lock = threading.Lock()
_idle: dict[torch.device, list[DeviceMarks]] = {}


class DeviceMarks:
    """The marks of one group, on a stream of their own.

    Args:
        device: sets them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._marks = torch.zeros(NUMBER, dtype=torch.uint8, pin_memory=True)
        self._next = 0
        with torch.cuda.stream(self._stream):
            self._set = torch.ones(1, dtype=torch.uint8, device=device)

    @classmethod
    def take(cls, device: torch.device) -> DeviceMarks:
        """Return marks that no group uses."""
        with _lock:
            idle = _idle.setdefault(device, [])
            return idle.pop() if idle else cls(device)

    def after(self, work: Any) -> Callable[[], bool]:
        """Return a function that reports whether a collective has ended.

        Args:
            work: the library's handle; the caller keeps its tensors until the end.

        Raises:
            RuntimeError: the collective, or the device, has failed already.
        """
        mark = self._marks[self._next % NUMBER :][:1]
        self._next += 1
        mark.zero_()
        with torch.cuda.stream(self._stream):
            work.wait()  # of this stream, not of the host
            mark.copy_(self._set, non_blocking=True)
        return lambda: bool(mark)

    def give_back(self) -> None:
        """Let another group use them, once all collectives have ended; waits for that, without the lock."""
        with contextlib.suppress(RuntimeError):  # an error of the device, which ends the process
            self._stream.synchronize()
            with _lock:
                _idle[self._device].append(self)
