"""Reads this machine's health at intervals, in a thread of its own; the coordinator judges the readings.

Reading must not block the agent: file systems and drivers can hang in the kernel. A first reading that does not arrive
is itself reported as the problem.
"""

from __future__ import annotations

import contextlib
import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import psutil  # type: ignore[import-untyped]

from unicron_lightning import wire
from unicron_lightning.agent.checks.gpus import Gpus

READ_SECONDS: Final = 15.0
FIRST_SECONDS: Final = 20.0
"""Seconds to wait for the first reading, which decides whether the agent may have workers."""


def read_host(root: Path = Path("/")) -> wire.NodeReading:
    """Read disks and memory. Unreadable values are left out."""
    disks = {}
    for path in dict.fromkeys((tempfile.gettempdir(), str(Path.cwd()))):
        with contextlib.suppress(OSError):
            state = os.statvfs(path)
            disks[path] = state.f_bavail * state.f_frsize
    memory = psutil.virtual_memory()
    pressure = None
    with contextlib.suppress(OSError, ValueError, IndexError):
        full = next(line for line in (root / "proc/pressure/memory").read_text().splitlines() if line[:4] == "full")
        pressure = float(full.split("avg10=")[1].split()[0])
    return wire.NodeReading(
        disk_free_bytes=disks,
        memory_free_percent=100 * memory.available / memory.total if memory.total else None,
        memory_pressure_percent=pressure,
    )


class HealthWatch:
    """Health readings of one agent.

    Args:
        told: called in the watch's thread with each reading but the first.
        read: reads the host.
        gpus: creates the reader of the GPUs.
    """

    def __init__(
        self,
        told: Callable[[wire.NodeReading], None],
        read: Callable[[], wire.NodeReading] = read_host,
        gpus: Callable[[], Gpus] = Gpus,
    ) -> None:
        self._told = told
        self._read = read
        self._gpus = gpus
        self._closing = threading.Event()
        self._first: queue.SimpleQueue[wire.NodeReading] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="unicron-health", daemon=True)

    def start(self) -> wire.NodeReading:
        """Start reading; return the first reading, or a missing one after the time limit."""
        self._thread.start()
        try:
            return self._first.get(timeout=FIRST_SECONDS)
        except queue.Empty:
            return wire.NodeReading(missing=True)

    def close(self) -> None:
        """Stop; a thread that hangs in the kernel is left behind."""
        self._closing.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        gpus = self._gpus()
        began = time.monotonic()
        self._first.put(self._all(gpus))
        late = time.monotonic() - began > FIRST_SECONDS
        while late or not self._closing.wait(READ_SECONDS):
            late = False
            with contextlib.suppress(RuntimeError):  # the agent has ended meanwhile
                self._told(self._all(gpus))
        gpus.close()

    def _all(self, gpus: Gpus) -> wire.NodeReading:
        host = self._read()
        return wire.NodeReading(
            disk_free_bytes=host.disk_free_bytes,
            memory_free_percent=host.memory_free_percent,
            memory_pressure_percent=host.memory_pressure_percent,
            gpus=gpus.read(),
            gpu_error=gpus.error,
        )
