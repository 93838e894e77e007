"""Copies this worker's parts of a state to shared memory, and hands them to its agent.

The training thread only copies. A thread of its own computes the digests and notifies the agent, which opens the memory
and keeps it when this process ends. Memory that the agent has dropped is filled again: its pages are there already. The
memory has no name in any file system, so none is left behind.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import psutil  # type: ignore[import-untyped]
import torch

from unicron_lightning import wire
from unicron_lightning.shared_memory import allocate, digest_of, in_use
from unicron_lightning.worker.control.thread import Control
from unicron_lightning.worker.engine import World
from unicron_lightning.worker.state_parts import DividedState, SharePart

logger = logging.getLogger(__name__)

_KEPT: Final = 2
"""Versions for which memory that the agent has not been seen to keep is held open, so that it has time to open it."""
_GRAIN: Final = 1 << 16
"""Bytes: sizes of memory are multiples of it, because the root's length changes a little from version to version."""


@dataclass
class _Memory:
    """Memory for one part.

    Attributes:
        number: number of the version in it, counted by this worker.
        taken: whether the agent has been seen to keep that version.
    """

    descriptor: int
    content: mmap.mmap
    number: int = 0
    taken: bool = False


@dataclass(frozen=True, kw_only=True)
class StagedVersion:
    """This worker's parts of a version in memory, before the agent gets them.

    Attributes:
        version: identity of the version.
        parts: by number, the memory of each part and the bytes that are used.
    """

    version: wire.StateVersion
    parts: Mapping[int, tuple[_Memory, int]]

    def view(self, part: int) -> torch.Tensor:
        """Return a part's bytes, which share its memory; uint8 of shape ``(size,)``."""
        memory, size = self.parts[part]
        return torch.frombuffer(memory.content, dtype=torch.uint8, count=size)


class Staging:
    """Stages the states of one worker.

    Args:
        control: link to the agent.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._thread: threading.Thread | None = None
        self._open: list[_Memory] = []
        self._number = 0

    def stage(
        self,
        state: DividedState,
        step: int,
        world: World,
        plan: Sequence[SharePart],
        incoming: Mapping[int, int] | None = None,
    ) -> StagedVersion:
        """Copy this rank's parts of a state at a step boundary; `hand_over` follows.

        Args:
            state: this rank's.
            step: optimizer steps finished.
            world: members that stage the version.
            plan: all parts.
            incoming: size of each part that this rank will receive: there is memory for it in the result.

        Raises:
            OSError, MemoryError: there is not enough memory, or the digests of the version before are not computed yet.
        """
        if self._thread is not None and self._thread.is_alive():
            raise OSError("the version before is still being handed over")
        version = wire.StateVersion(
            life=self._control.welcome.life,
            epoch=world.epoch,
            step=step,
            parts=len(plan),
            copies=min(len(part.holders) + len(part.receivers) for part in plan),
            layout=state.layout,
        )
        mine = [part for part in plan if world.rank in part.holders]
        sizes = {part.number: state.size(part.piece, part.pieces) for part in mine}
        sizes.update(incoming or {})
        memory = self._memory(list(sizes.values()))
        parts = {number: (each, size) for (number, size), each in zip(sizes.items(), memory, strict=True)}
        staged = StagedVersion(version=version, parts=parts)
        for part in mine:
            state.write(part.piece, part.pieces, staged.view(part.number))
        return staged

    def hand_over(self, staged: StagedVersion) -> None:
        """Give the agent all parts of a version, in a thread that computes their digests first."""
        self._thread = threading.Thread(target=self._hand_over, args=(staged,), name="unicron-staging", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Release the memory; the agent keeps what it has opened."""
        if self._thread is not None:
            self._thread.join()
        self._release(self._open)

    def _memory(self, sizes: Sequence[int]) -> list[_Memory]:
        """Return memory for parts of these sizes: what the agent has dropped, or new one."""
        self._number += 1
        free = self._dropped()
        found: dict[int, _Memory] = {}
        for place, size in enumerate(sizes):
            fits = next((memory for memory in free if 0 <= len(memory.content) - size < 2 * _GRAIN), None)
            if fits is not None:
                free.remove(fits)
                found[place] = fits
        self._release(free)
        needed = sum(size for place, size in enumerate(sizes) if place not in found)
        available = psutil.virtual_memory().available
        if needed > available // 2:
            raise MemoryError(f"the copy needs {needed} bytes, more than half of the {available} that are free")
        for place, size in enumerate(sizes):
            if place not in found:
                found[place] = _Memory(*allocate((size // _GRAIN + 1) * _GRAIN))
                self._open.append(found[place])
            found[place].number, found[place].taken = self._number, False
        return [found[place] for place in range(len(sizes))]

    def _dropped(self) -> list[_Memory]:
        """Return memory that the agent has kept and dropped; release what it has not kept in time."""
        free = []
        for memory in list(self._open):
            if in_use(memory.descriptor):
                memory.taken = True
            elif memory.taken:
                free.append(memory)
            elif self._number - memory.number > _KEPT:
                self._release([memory])
        return free

    def _release(self, memories: Sequence[_Memory]) -> None:
        for memory in list(memories):
            self._open.remove(memory)
            os.close(memory.descriptor)

    def _hand_over(self, staged: StagedVersion) -> None:
        copies = []
        for part, (memory, size) in staged.parts.items():
            digest = digest_of(memoryview(memory.content)[:size])
            copy = wire.StateCopy(version=staged.version, part=part, size=size, digest=digest)
            copies.append(wire.OpenCopy(copy=copy, descriptor=memory.descriptor))
        self._control.send(wire.StateStaged(worker=self._control.worker, staged=tuple(copies)))
