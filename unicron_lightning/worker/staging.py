"""Copies this worker's parts of a state to shared memory, and hands them to its agent.

The training thread only copies. A thread of its own computes the digests and notifies the agent, which opens the memory
and keeps it when this process ends. The memory has no name in any file system, so none is left behind.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import Final

import psutil  # type: ignore[import-untyped]
import torch

from unicron_lightning import wire
from unicron_lightning.shared_memory import allocate
from unicron_lightning.worker.control.thread import Control
from unicron_lightning.worker.engine import World
from unicron_lightning.worker.state_parts import DividedState, holders

logger = logging.getLogger(__name__)

_KEPT: Final = 2
"""Versions that are held open, so that the agent has time to open them."""


class Staging:
    """Stages the states of one worker.

    Args:
        control: link to the agent.
        partners: copies of each part on other nodes.
    """

    def __init__(self, control: Control, partners: int) -> None:
        self._control = control
        self._partners = partners
        self._thread: threading.Thread | None = None
        self._open: deque[list[int]] = deque()

    def stage(self, state: DividedState, step: int, world: World) -> None:
        """Copy this rank's parts of a state at a step boundary.

        Raises:
            OSError, MemoryError: there is not enough memory, or the digests of the version before are not computed yet.
        """
        if self._thread is not None and self._thread.is_alive():
            raise OSError("the version before is still being handed over")
        copies = len(holders(world.nodes, 0, self._partners))
        version = wire.StateVersion(
            life=self._control.welcome.life,
            epoch=world.epoch,
            step=step,
            parts=world.size,
            copies=copies,
            layout=state.layout,
        )
        mine = [part for part in range(world.size) if world.rank in holders(world.nodes, part, self._partners)]
        needed, free = sum(state.size(part, world.size) for part in mine), psutil.virtual_memory().available
        if needed > free // 2:
            raise MemoryError(f"the copy needs {needed} bytes, more than half of the {free} that are free")
        staged = []
        self._open.append([])
        for part in mine:
            descriptor, memory = allocate(state.size(part, world.size))
            self._open[-1].append(descriptor)
            state.write(part, world.size, torch.frombuffer(memory, dtype=torch.uint8))
            staged.append((part, descriptor, memory))
        self._forget(_KEPT)
        self._thread = threading.Thread(
            target=self._hand_over, args=(version, staged), name="unicron-staging", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Release the memory; the agent keeps what it has opened."""
        if self._thread is not None:
            self._thread.join()
        self._forget(0)

    def _forget(self, kept: int) -> None:
        while len(self._open) > kept:
            for descriptor in self._open.popleft():
                os.close(descriptor)

    def _hand_over(self, version: wire.StateVersion, staged: Sequence[tuple[int, int, mmap.mmap]]) -> None:
        copies = []
        for part, descriptor, memory in staged:
            digest = hashlib.sha256(memory).hexdigest()
            copy = wire.StateCopy(version=version, part=part, size=len(memory), digest=digest)
            copies.append(wire.OpenCopy(copy=copy, descriptor=descriptor))
        self._control.send(wire.StateStaged(worker=self._control.worker, staged=tuple(copies)))
