"""Copies this worker's parts of a state to shared memory, and hands them to its agent.

The training thread only copies. A thread of its own computes the digests and notifies the agent, which opens the memory
and keeps it when this process ends. Memory that the agent has dropped is filled again: its pages are there already. The
memory has no name in any file system, so none is left behind.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from unicron_lightning import wire
from unicron_lightning.shared_memory import digest_of, in_use
from unicron_lightning.worker.control.thread import Control
from unicron_lightning.worker.engine import World
from unicron_lightning.worker.memory_pool import MemoryPool, PooledMemory
from unicron_lightning.worker.state_parts import DividedState, SharePart

logger = logging.getLogger(__name__)

_KEPT: Final = 2
"""Versions for which memory that the agent has not been seen to keep is held open, so that it has time to open it."""


@dataclass
class _Handed:
    """Memory of one part that the agent may keep.

    Attributes:
        number: number of the version in it, counted by this worker.
        taken: whether the agent has been seen to keep that version.
    """

    memory: PooledMemory
    number: int
    taken: bool = False


@dataclass(frozen=True, kw_only=True)
class StagedVersion:
    """This worker's parts of a version in memory, before the agent gets them.

    Attributes:
        version: identity of the version.
        parts: by number, the memory of each part and the bytes that are used.
    """

    version: wire.StateVersion
    parts: Mapping[int, tuple[PooledMemory, int]]

    def view(self, part: int) -> torch.Tensor:
        """Return a part's bytes, which share its memory; uint8 of shape ``(size,)``."""
        memory, size = self.parts[part]
        return memory.view(size)


class Staging:
    """Stages the states of one worker.

    Args:
        control: link to the agent.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._thread: threading.Thread | None = None
        self._pool = MemoryPool()
        self._handed: list[_Handed] = []
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
        for each in self._handed:
            each.memory.release()
        self._handed.clear()
        self._pool.close()

    def _memory(self, sizes: Sequence[int]) -> list[PooledMemory]:
        """Return memory for parts of these sizes: what the agent has dropped, or new one."""
        self._number += 1
        self._review()
        memories = self._pool.take(sizes)
        self._handed += [_Handed(memory, self._number) for memory in memories]
        return memories

    def _review(self) -> None:
        """Take back what the agent has kept and dropped; release what it has not kept in time."""
        for each in list(self._handed):
            if in_use(each.memory.descriptor):
                each.taken = True
            elif each.taken:
                self._handed.remove(each)
                self._pool.give_back([each.memory])
            elif self._number - each.number > _KEPT:
                self._handed.remove(each)
                each.memory.release()

    def _hand_over(self, staged: StagedVersion) -> None:
        copies = []
        for part, (memory, size) in staged.parts.items():
            digest = digest_of(memoryview(memory.content)[:size])
            copy = wire.StateCopy(version=staged.version, part=part, size=size, digest=digest)
            copies.append(wire.OpenCopy(copy=copy, descriptor=memory.descriptor))
        self._control.send(wire.StateStaged(worker=self._control.worker, staged=tuple(copies)))
