"""The process that writes a worker's part of checkpoints, while the worker trains, and versions as it sees them.

    python -m unicron_lightning.checkpoints.writer DESCRIPTOR

It ends when the worker closes the connection, or dies, once it has written the worker's own part of the versions that
it has received. The memory with the state has no name: it is gone when both have ended. At the end of a run the worker
itself may write its versions.

Each writer writes its part of a version, and one the index, without any collective. The files in the storage are all
that the writers know of each other, beside the ranks that their workers report as gone. A part that is not described is
written by the first of its holders that is not gone, and the first rank that is not gone writes the index once all
parts are described. Two writers may take themselves for the first one, if one is gone but still runs: they write equal
files under different names, and the index refers to those that it has seen complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Final

import msgspec
import torch

from unicron_lightning.checkpoints.files import INDEX, leave_record, total
from unicron_lightning.checkpoints.messages import (
    HOLDERS_LOST,
    Channel,
    LeaveUntraced,
    ToWriter,
    VersionFailed,
    VersionOutcome,
    VersionOver,
    VersionWritten,
    WriterReady,
    WritersGone,
    WriteVersion,
)
from unicron_lightning.checkpoints.pieces import WrittenPart, publish, tensor_in, write_part
from unicron_lightning.checkpoints.storage import DATA_SUFFIX, VersionStorage, storage_of
from unicron_lightning.worker.codec import unpack_parts

_NOTICE_SECONDS: Final = 2.0
"""Seconds in which all writers that have begun notice that a version has failed."""
_LOST_SECONDS: Final = 10.0
"""Seconds after which a version fails because all holders of a part are gone: their writers outlive them a while."""
BEGIN_SECONDS: Final = 60.0
"""Seconds at the end of a run in which the first writer of a version begins: one that is gone is replaced before."""
_ABANDON_SECONDS: Final = 60.0
"""Seconds after which the files of a failed version are deleted, even if some writers have not begun."""


class WritingVersion:
    """This writer's work on a version.

    Args:
        order: the worker's order.
        memories: of the parts and, last, of the objects.
        storage: of the version.

    Attributes:
        order: as above.
    """

    def __init__(self, order: WriteVersion, memories: Sequence[mmap.mmap], storage: VersionStorage) -> None:
        self.order = order
        self._memories = memories
        self._storage = storage
        self._gone: set[int] = set()
        self._written: set[int] = set()
        self._began = False
        self._failed_at = 0.0
        self._lost: tuple[list[int], int, float] = [], 0, 0.0
        """Parts whose holders are gone, the number of files, and since when these have not changed."""
        self._finishers = sorted({rank for holders in order.holders for rank in holders})
        self._since = time.monotonic()

    @property
    def age(self) -> float:
        """Seconds since this writer has known of the version."""
        return time.monotonic() - self._since

    @property
    def has_written(self) -> bool:
        """Whether this writer has written a part."""
        return bool(self._written)

    def gone(self, ranks: Sequence[int]) -> None:
        """Learn that ranks are no longer members."""
        self._gone.update(ranks)

    def advance(self) -> VersionOutcome | None:
        """Do what is due now; return the outcome once it is known."""
        try:
            return self._advance()
        except Exception as error:  # noqa: BLE001 - boundary of a version: a storage's package raises errors of its own
            with contextlib.suppress(Exception):
                if (digest := self._digest()) is not None:  # another writer was faster
                    return VersionWritten(number=self.order.number, digest=digest)
            if self._written and self.leaves_no_trace():  # it was removed while this writer looked at it
                return VersionOver(number=self.order.number)
            return self._fail(f"rank {self.order.rank}: {error}")

    def _advance(self) -> VersionOutcome | None:
        order, storage = self.order, self._storage
        if order.error:
            return self._fail(f"rank {order.rank}: {order.error}")
        self._write_own()
        names = storage.names()
        described = {int(name.split("-")[1]) for name in names if name.startswith("part-")}
        if failed := [name for name in names if name.startswith("failed-")]:
            return self._abandoned(storage.read(failed[0]).decode(errors="replace"))
        for part, holders in enumerate(order.holders):
            if part not in described and part not in self._written and self._is_first(holders):
                self._write(part)
        missing = set(range(len(order.holders))) - described
        if not missing and self._is_first(self._finishers):
            self._finish(names)
        if (digest := self._digest()) is not None:
            storage.clean()  # of writers that were late
            return VersionWritten(number=order.number, digest=digest)
        if (lost := self._lost_parts(missing, names)) and time.monotonic() > self._lost[-1] + _LOST_SECONDS:
            return self._fail(f"{HOLDERS_LOST} {lost} were lost before these were written")
        if self.age > order.seconds:
            return self._fail(f"parts {sorted(missing)} were not written within {order.seconds:g} s")
        return None

    def _lost_parts(self, missing: set[int], names: Sequence[str]) -> list[int]:
        """Return the missing parts that no member holds, and note since when nothing has come of them."""
        lost = sorted(part for part in missing if self._gone.issuperset(self.order.holders[part]))
        if (lost, len(names)) != self._lost[:2]:
            self._lost = lost, len(names), time.monotonic()
        return lost

    def leave(self) -> None:
        """Write the part of this rank, whose worker has ended, and leave the rest to others."""
        with contextlib.suppress(Exception):  # there is no worker to which it could be reported
            if not self.order.error:
                self._write_own()

    def leaves_no_trace(self) -> bool:
        """Whether nothing of the version is in the storage, and others have to write all of it, or have removed it."""
        if not self._written and any(map(self._is_first, (self._finishers, *self.order.holders))):
            return False
        try:
            return not self._storage.names() and self._digest() is None
        except Exception:  # noqa: BLE001 - a storage's package raises errors of its own
            return False

    def _begin(self) -> None:
        """Make the version's place, before this writer's first file: one that has nothing to write makes none."""
        if not self._began:
            self._storage.begin()
            self._began = True

    def _write_own(self) -> None:
        for part, holders in enumerate(self.order.holders):
            if holders[:1] == [self.order.rank] and part not in self._written:
                self._write(part)

    def _is_first(self, ranks: Sequence[int]) -> bool:
        return next((rank for rank in ranks if rank not in self._gone), None) == self.order.rank

    # ---- parts

    def _write(self, part: int) -> None:
        """Write a part, and then its description."""
        found = [place for place, each in enumerate(self.order.parts) if each.part == part]
        if not found:
            return
        staged, memory = self.order.parts[found[0]], self._memories[found[0]]
        self._begin()
        pieces = ((each, tensor_in(memory, each)) for each in staged.tensors)
        written = write_part(self._storage, part, self.order.rank, pieces)
        record = msgspec.structs.replace(written, version=self.order.name)
        with self._storage.create(f"part-{part}-{self.order.rank}.json") as file:
            file.write(msgspec.json.encode(record))
        self._written.add(part)

    # ---- the end

    def _finish(self, names: Sequence[str]) -> None:
        """Write objects, further files and index."""
        order, storage = self.order, self._storage
        self._begin()
        described = {name: _record(storage.read(name)) for name in sorted(names) if name.startswith("part-")}
        there, known = (
            {storage.prefix + name for name in names},
            {n for each in described.values() for n in each.digests},
        )
        records = {name.split("-")[1]: each for name, each in described.items() if there.issuperset(each.digests)}
        pieces = [piece for record in records.values() for piece in record.pieces]
        # When all workers have ended, each writer may take the others for gone and finish. What another one may refer
        # to stays: described parts, and the objects.
        for name in names:
            if name.startswith("__") and name.endswith(DATA_SUFFIX) and storage.prefix + name not in known:
                storage.remove(name)
        contents = unpack_parts(self._memories[-1][:])
        files = dict(zip(order.files, contents, strict=False))
        objects = dict(zip(order.objects, contents[len(order.files) :], strict=True))
        publish(storage, pieces, objects, files, order.places)

    def _digest(self) -> str | None:
        """Return the digest of the complete version; None if it is not complete."""
        storage = self._storage
        names = storage.published()
        if INDEX not in names:
            return None
        if storage.prefix:
            there = any(name.startswith(storage.prefix) for name in names)
            records = [_record(storage.read(name)) for name in storage.names() if name.startswith("part-") and there]
        else:
            records = [_record(storage.read_published(name)) for name in names if name.startswith("part-")]
        if not records or any(record.version != self.order.name for record in records):
            return None
        known = {name: digest for record in records for name, digest in record.digests.items()}

        def digest(name: str) -> str:
            return known.get(name) or hashlib.sha256(storage.read_published(name)).hexdigest()

        return total({name: digest(name) for name in names})

    def _fail(self, error: str) -> VersionFailed:
        """Notify the other writers, if possible, that the version cannot be completed."""
        with contextlib.suppress(Exception):
            self._begin()
            with self._storage.create(f"failed-{self.order.rank}") as file:
                file.write(error.encode())  # without it they reach their time limits
        return self._abandoned(error)

    def _abandoned(self, error: str) -> VersionFailed:
        self._failed_at = time.monotonic()
        return VersionFailed(number=self.order.number, error=error)

    def forget(self, *, now: bool = False) -> bool:
        """Delete the files of a failed version once all writers have noticed the failure; return whether that is over.

        Args:
            now: do not wait.
        """
        if not self._is_first(self._finishers):
            return True
        elapsed = time.monotonic() - self._failed_at
        with contextlib.suppress(Exception):
            if not now and (elapsed < _NOTICE_SECONDS or (elapsed < _ABANDON_SECONDS and self._begin_late())):
                return False
            self._storage.abandon()
        return True

    def _begin_late(self) -> bool:
        """Whether a writer that has to write a part has not begun: it would wait for the others if it found nothing."""
        came = {int(name.split(".")[0].split("-")[-1]) for name in self._storage.names() if name[0] in "pf"}
        first = (next((rank for rank in holders if rank not in self._gone), None) for holders in self.order.holders)
        return not came >= {rank for rank in first if rank is not None}


def _record(content: bytes) -> WrittenPart:
    return msgspec.json.decode(content, type=WrittenPart)


class Versions:
    """Versions that are not finished.

    Attributes:
        ending: whether the worker's run ends: nothing is waited for to which this writer has nothing to add.
    """

    def __init__(self) -> None:
        self.ending = False
        self._versions: dict[int, WritingVersion] = {}
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
        self._versions[order.number] = WritingVersion(order, memories, storage_of(order.path, order.name))

    def gone(self, number: int, ranks: Sequence[int]) -> None:
        """Learn that ranks of a version are no longer members."""
        if number in self._versions:
            self._versions[number].gone(ranks)

    def leave_untraced(self) -> None:
        """Wait for no present version of which there is no trace, and to which this writer has nothing to add."""
        self._untraced = max(self._versions, default=0)

    def advance(self) -> list[VersionOutcome]:
        """Do what is due now; return the outcomes that are known since."""
        outcomes: list[VersionOutcome] = []
        self._failed = [version for version in self._failed if not version.forget()]
        for number, version in list(self._versions.items()):
            outcome = version.advance()
            if isinstance(outcome, VersionWritten):
                _leave_record(version.order, outcome.digest)
            elif isinstance(outcome, VersionFailed):
                self._failed.append(version)
            if outcome is not None:
                self._decided = max(self._decided, number)
                outcomes.append(outcome)
                del self._versions[number]
        for number, version in list(self._versions.items()):
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
        for version in self._versions.values():
            version.leave()


def _leave_record(order: WriteVersion, digest: str) -> None:
    """Leave the record of a complete version, as its worker may have ended."""
    if order.record:
        with contextlib.suppress(OSError):  # the agent, too
            leave_record(Path(order.record), order.path, order.step, digest, order.fit)


_LOOK_SECONDS: Final = 0.05
"""Seconds between two looks at the files of other writers."""
_LAST_SECONDS: Final = 600
"""Seconds after the worker's end in which this process ends, even if the storage does not answer."""
_NICE: Final = 5
"""Added to the niceness: the training has precedence."""


def serve(channel: Channel) -> None:
    """Write versions until the worker is gone."""
    versions = Versions()
    channel.send(WriterReady())
    while True:
        ready = wait([channel.fileno()], _LOOK_SECONDS if versions else None)
        if ready:
            received = channel.receive()
            if received is None:
                signal.alarm(_LAST_SECONDS)
                versions.leave()
                return
            message, descriptors = received
            if isinstance(message, WriteVersion):
                versions.add(message, [_mapped(descriptor) for descriptor in descriptors])
            elif isinstance(message, WritersGone):
                versions.gone(message.number, message.ranks)
            elif isinstance(message, LeaveUntraced):
                versions.leave_untraced()
            else:
                versions.ending = True
        for outcome in versions.advance():
            channel.send(outcome)


def _mapped(descriptor: int) -> mmap.mmap:
    try:
        return mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)


def main() -> None:
    """Serve the worker that started this process, in a session of its own: signals to the worker's do not reach it."""
    descriptor = int(sys.argv[1])
    os.nice(_NICE)
    torch.set_num_threads(1)
    with socket.socket(fileno=descriptor) as connection, contextlib.suppress(OSError):
        serve(Channel(connection, ToWriter))


if __name__ == "__main__":
    main()
