"""States of training in the agent's memory, staged by its workers, which they outlive.

The agent holds shared memory open and never reads it. It keeps the newest version of which the coordinator has reported
that all its parts are held, and the two newest ones beside it; their sum is the memory's bound.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Final

from unicron_lightning import wire
from unicron_lightning.agent.workers.local_socket import LocalServer
from unicron_lightning.shared_memory import opened

logger = logging.getLogger(__name__)

_NEWER: Final = 2
"""Versions that are kept beside the complete one: one may be staged while the other is reported."""


class AgentMemory:
    """Copies in the memory of one agent; lives in its event loop.

    Args:
        send: sends a message to the coordinator.
    """

    def __init__(self, send: Callable[[wire.Message], None]) -> None:
        self._send = send
        self._complete: wire.StateVersion | None = None
        self._held: dict[wire.StateVersion, dict[int, wire.OpenCopy]] = {}

    @property
    def copies(self) -> tuple[wire.StateCopy, ...]:
        """All copies, oldest version first."""
        return tuple(each.copy for version in sorted(self._held) for each in self._held[version].values())

    def hear(self, message: wire.StateStaged | wire.StateWanted, pid: int | None, workers: LocalServer) -> None:
        """Handle a message of a worker; without its process id, nothing that it has staged can be opened.

        Args:
            message: from the worker.
            pid: its process id.
            workers: sends the answer.
        """
        if isinstance(message, wire.StateWanted):
            workers.send(message.worker, self.given())
        elif pid is not None:
            self.take(pid, message)

    def take(self, pid: int, message: wire.StateStaged) -> None:
        """Keep what the worker with this process id has staged; a copy that cannot be opened is left out."""
        for each in message.staged:
            try:
                descriptor = opened(pid, each)
            except OSError as error:
                logger.warning("state_not_kept worker=%s part=%d error=%s", message.worker, each.copy.part, error)
                continue
            parts = self._held.setdefault(each.copy.version, {})
            if (before := parts.get(each.copy.part)) is not None:
                os.close(before.descriptor)
            parts[each.copy.part] = wire.OpenCopy(copy=each.copy, descriptor=descriptor)
        self._review()
        self._send(wire.StateHeld(copies=self.copies))

    def complete(self, version: wire.StateVersion) -> None:
        """Drop versions older than one of which all parts are held."""
        if self._complete is None or self._complete < version:
            self._complete = version
            before = len(self._held)
            self._review()
            if len(self._held) < before:
                self._send(wire.StateHeld(copies=self.copies))

    def given(self) -> wire.StateGiven:
        """Return all copies, for a worker that begins."""
        held = tuple(each for version in sorted(self._held) for each in self._held[version].values())
        return wire.StateGiven(pid=os.getpid(), copies=held)

    def close(self) -> None:
        """Release everything."""
        self._drop(list(self._held))

    def _review(self) -> None:
        complete = self._complete if self._complete in self._held else None
        newest = [version for version in sorted(self._held) if version != complete][-_NEWER:]
        kept = [version for version in newest if complete is None or version > complete]
        self._drop([version for version in self._held if version not in kept and version != complete])

    def _drop(self, versions: list[wire.StateVersion]) -> None:
        for version in versions:
            for each in self._held.pop(version).values():
                os.close(each.descriptor)
