"""The versions on which one writer works: in its own process, or in the worker at the end of a run."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from pathlib import Path

from unicron_lightning.checkpoints.messages import ToWorker, VersionFailed, VersionOver, VersionWritten, WriteVersion
from unicron_lightning.checkpoints.records import leave_record
from unicron_lightning.checkpoints.storage import storage_of
from unicron_lightning.checkpoints.version import WritingVersion


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
        self._complete = 0
        """Number of the newest complete version."""
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
        """Do what is due now; return the outcomes that are known since.

        A version of which there is no trace, and to which this writer has nothing to add, has been published and
        removed, or abandoned, by others if a later one is complete.
        """
        outcomes: list[ToWorker] = []
        self._failed = [version for version in self._failed if not version.forget()]
        for number, (version, _) in list(self._versions.items()):
            outcome = version.advance()
            if isinstance(outcome, VersionWritten):
                self._complete = max(self._complete, number)
                _leave_record(version.order, outcome.digest)
            elif isinstance(outcome, VersionFailed):
                self._failed.append(version)
            if outcome is not None:
                outcomes.append(outcome)
                del self._versions[number]
        for number, (version, _) in list(self._versions.items()):
            left = self.ending or number < self._complete or number <= self._untraced
            if left and version.leaves_no_trace():
                outcomes.append(VersionOver(number=number))
                del self._versions[number]
        return outcomes

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
