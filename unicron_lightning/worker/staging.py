"""Copies this worker's parts of a state to shared memory, and hands them to its agent.

The agent keeps the memory when this process ends, and computes the digests. Memory that the agent has dropped is filled
again: its pages are there already. The memory has no name in any file system, so none is left behind.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from unicron_lightning import environ, wire
from unicron_lightning.shared_memory import MemoryPool, PooledMemory, in_use, opened
from unicron_lightning.worker.control.thread import Control
from unicron_lightning.worker.engine import World
from unicron_lightning.worker.state_parts import DividedState, SharePart


class MemoryLink:
    """Hands shared memory to the agent, by descriptors over a UNIX socket beside the one for messages.

    From the end of `hand_over` on, the memory is kept whatever happens to this process, and whatever the agent is
    doing: descriptors under way hold it as open ones do. The link is opened with the first hand-over, and again after
    an error.

    Args:
        worker: this worker's identity.
        agent_socket: path of the agent's socket for messages.
    """

    def __init__(self, worker: str, agent_socket: str) -> None:
        self._worker = worker
        self._path = str(Path(agent_socket).with_name(environ.MEMORY_SOCKET))
        self._socket: socket.socket | None = None

    def hand_over(self, copies: Sequence[wire.StateCopy], descriptors: Mapping[int, int]) -> None:
        """Give the agent copies; never waits.

        Args:
            copies: what is in the memory.
            descriptors: this process's, by the number of the part.

        Raises:
            OSError: the agent is not there, or has not taken many earlier ones.
        """
        message = wire.encode(wire.StateStaged(worker=self._worker, staged=tuple(copies)))
        with contextlib.ExitStack() as stack:
            lent = []
            for copy in copies:
                lent.append(opened("self", descriptors[copy.part], copy.size))
                stack.callback(os.close, lent[-1])
            try:
                socket.send_fds(self._connected(), [message], lent)
            except OSError:
                self.close()
                raise

    def close(self) -> None:
        """Close the link; the agent still receives what has been handed over."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connected(self) -> socket.socket:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._socket.setblocking(False)
            self._socket.connect(self._path)
        return self._socket


_MOST_KEPT: Final = 5
"""Versions that an agent may keep: three, and those that it has not looked at yet."""


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
        fit: number of the script's ``fit``.
    """

    def __init__(self, control: Control, fit: int = 1) -> None:
        self._control = control
        self._fit = fit
        self._link = MemoryLink(control.worker, control.path)
        self._pool = MemoryPool()
        self._handed: list[list[PooledMemory]] = []
        """Memory of each version that the agent may keep."""

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
            OSError, MemoryError: there is not enough memory, or the agent has not looked at the versions before.
        """
        version = wire.StateVersion(
            life=self._control.welcome.life,
            epoch=world.epoch,
            step=step,
            parts=len(plan),
            copies=min(len(part.holders) + len(part.receivers) for part in plan),
            layout=state.layout,
            fit=self._fit,
        )
        mine = [part for part in plan if world.rank in part.holders]
        sizes = {part.number: state.size(*part.share) for part in mine}
        sizes.update(incoming or {})
        memory = self._memory(list(sizes.values()))
        parts = {number: (each, size) for (number, size), each in zip(sizes.items(), memory, strict=True)}
        staged = StagedVersion(version=version, parts=parts)
        for part in mine:
            state.write(*part.share, staged.view(part.number))
        return staged

    def hand_over(self, staged: StagedVersion) -> None:
        """Give the agent all parts of a version, which it keeps from now on.

        Raises:
            OSError: the agent cannot be reached.
        """
        copies = [
            wire.StateCopy(version=staged.version, part=part, size=size) for part, (_, size) in staged.parts.items()
        ]
        if copies:
            self._link.hand_over(copies, {part: memory.descriptor for part, (memory, _) in staged.parts.items()})

    def close(self) -> None:
        """Release the memory; the agent keeps what it has opened."""
        self._link.close()
        for memory in [memory for memories in self._handed for memory in memories]:
            memory.release()
        self._handed.clear()
        self._pool.close()

    def _memory(self, sizes: Sequence[int]) -> list[PooledMemory]:
        """Return memory for parts of these sizes: what the agent has dropped, or new one."""
        for memories in list(self._handed):
            if not any(in_use(memory.descriptor) for memory in memories):
                self._handed.remove(memories)
                self._pool.give_back(memories)
        if len(self._handed) >= _MOST_KEPT:
            raise OSError(f"the agent keeps {len(self._handed)} versions, expected fewer than {_MOST_KEPT}")
        memories = self._pool.take(sizes)
        self._handed.append(memories)
        return memories
