"""The versions on which one writer works: in its own process, or in the worker at the end of a run."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from unicron_lightning.checkpoints.messages import ToWorker, VersionFailed, VersionOver, VersionWritten, WriteVersion
from unicron_lightning.checkpoints.records import leave_record
from unicron_lightning.checkpoints.storage import storage_of
from unicron_lightning.checkpoints.version import WritingVersion

BEGIN_SECONDS: Final = 60.0
"""Seconds at the end of a run in which the first writer of a version begins: one that is gone is replaced before."""


class Versions:
    """Versions that are not finished.

    Attributes:
        ending: whether the worker's run ends: nothing is waited for to which this writer has nothing to add.
    """

    def __init__(self) -> None:
        self.ending = False
        self._versions: dict[int, tuple[WritingVersion, Sequence[mmap.mmap]]] = {}
        self._failed: list[WritingVersion] = []
        """Versions whose files are still there, for writers that have not noticed."""
        self._decided = 0
        """Number of the newest version that is complete, or has failed."""
        self._untraced = 0
        """Versions up to this number are not waited for if there is no trace of them."""

    def __bool__(self) -> bool:
        return bool(self._versions or self._failed)

    def add(self, order: WriteVersion, memories: Sequence[mmap.mmap]) -> None:
        """Begin to write a version.

        Args:
            order: the worker's.
            memories: of the parts and, last, of the objects.
        """
        storage = storage_of(order.path, order.name)
        self._versions[order.number] = WritingVersion(order, memories, storage), memories

    def gone(self, number: int, ranks: Sequence[int]) -> None:
        """Learn that ranks of a version are no longer members."""
        if number in self._versions:
            self._versions[number][0].gone(ranks)

    def leave_untraced(self) -> None:
        """Wait for no present version of which there is no trace, and to which this writer has nothing to add."""
        self._untraced = max(self._versions, default=0)

    def advance(self) -> list[ToWorker]:
        """Do what is due now; return the outcomes that are known since."""
        outcomes: list[ToWorker] = []
        self._failed = [version for version in self._failed if not version.forget()]
        for number, (version, _) in list(self._versions.items()):
            outcome = version.advance()
            if isinstance(outcome, VersionWritten):
                _leave_record(version.order, outcome.digest)
            elif isinstance(outcome, VersionFailed):
                self._failed.append(version)
            if outcome is not None:
                self._decided = max(self._decided, number)
                outcomes.append(outcome)
                del self._versions[number]
        for number, (version, _) in list(self._versions.items()):
            if self._may_be_over(number, version) and version.leaves_no_trace():
                outcomes.append(VersionOver(number=number))
                del self._versions[number]
        return outcomes

    def _may_be_over(self, number: int, version: WritingVersion) -> bool:
        """Whether others have published and removed a version, or abandoned it, if there is no trace of it.

        At the end of a run nobody removes the newest version. Without a trace its first writer has not begun yet, and
        may die before it does: a writer that has a copy of its part waits for it.
        """
        if number < self._decided or number <= self._untraced:
            return True
        return self.ending and (version.has_written or version.age > BEGIN_SECONDS)

    def leave(self) -> None:
        """Write this rank's parts, as its worker has ended, and leave the rest to others."""
        for failed in self._failed:
            failed.forget(now=True)
        for version, _ in self._versions.values():
            version.leave()


def _leave_record(order: WriteVersion, digest: str) -> None:
    """Leave the record of a complete version, as its worker may have ended."""
    if order.record:
        with contextlib.suppress(OSError):  # the agent, too
            leave_record(Path(order.record), order.path, order.step, digest, order.fit)
