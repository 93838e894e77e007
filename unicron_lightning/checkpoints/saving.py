"""Operations that write a checkpoint while training waits: a file by one worker, or a folder by all that hold parts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from unicron_lightning.checkpoints.files import total
from unicron_lightning.checkpoints.pieces import HeldCheckpoint, WrittenPart, part_writers, publish, write_part
from unicron_lightning.checkpoints.storage import FolderStorage
from unicron_lightning.worker.communication.communicator import gather_bytes
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.operations import Indivisible
from unicron_lightning.worker.rows import Report, ReportSum


class WriteOnce(Indivisible):
    """Base of operations that write a checkpoint: repeated unless a present worker has written it.

    The result is the checkpoint's digest.
    """

    name = "save_checkpoint"

    def __init__(self) -> None:
        self.digest: str | None = None

    def plan(self, reports: ReportSum, rank: int) -> None:
        """Repeat everything unless a present worker has written the checkpoint."""
        digests = (report["digest"] for report in reports.members if report is not None)
        self.digest = next((digest for digest in digests if digest is not None), None)

    def report(self) -> Report:
        return {"digest": self.digest}

    def gather(self, engine: Engine, data: bytes, about: str = "") -> list[bytes]:
        """Exchange the bytes of all ranks."""
        engine.fault("agree", self.name + about)
        return gather_bytes(engine.communicator, data, engine.tag(self.name + about))


class WriteFile(WriteOnce):
    """Writes a file by one worker, and by another one if that one dies meanwhile.

    Args:
        write: writes the file with what was collected; returns the digest.
        collect: collects what the writer needs from other workers.
        writer: returns the rank that writes.
    """

    def __init__(
        self,
        write: Callable[[Sequence[bytes]], str],
        collect: Callable[[], Sequence[bytes]] = tuple,
        writer: Callable[[], int] = int,
    ) -> None:
        super().__init__()
        self._write = write
        self._collect = collect
        self._writer = writer

    def attempt(self, engine: Engine) -> bytes:
        writer = self._writer()
        if self.digest is None:
            collected = self._collect()
            if engine.world.rank == writer:
                engine.fault("checkpoint", engine.step)
                self.digest = self._write(collected)
        return self.gather(engine, b"" if self.digest is None else self.digest.encode())[writer]


class SaveFolder(WriteOnce):
    """Writes each part by a worker that holds it, and the index by one of these.

    If a worker dies meanwhile, everything is written again to another unfinished folder.

    Args:
        path: of the folder, in a file system that all workers see.
        names: returns the names of the parts that this worker holds, its own first; none if it is a spare.
        held: returns the checkpoint as this worker holds it; called by all workers that hold parts.
        done: called with the digest by the worker that has completed the folder.
    """

    def __init__(
        self,
        path: str,
        names: Callable[[], Sequence[str]],
        held: Callable[[], HeldCheckpoint],
        done: Callable[[str], None],
    ) -> None:
        super().__init__()
        self._path = Path(path)
        self._names = names
        self._held = held
        self._done = done
        self._storage: FolderStorage | None = None
        """Of the last attempt."""

    def attempt(self, engine: Engine) -> bytes:
        if self.digest is None:
            self._write(engine)
        known = b"" if self.digest is None else self.digest.encode()
        return next(each for each in self.gather(engine, known) if each)

    def _write(self, engine: Engine) -> None:
        """Write this worker's parts, and the index if that is this worker's."""
        rank, own = engine.world.rank, list(self._names())
        held_by = [
            msgspec.json.decode(each, type=list[str])
            for each in self.gather(engine, msgspec.json.encode(own), " parts")
        ]
        if self._storage is not None:
            self._storage.abandon()  # no member of this epoch writes there any more
        attempt = hashlib.sha256(f"{engine.world.epoch}".encode()).hexdigest()[:12]
        self._storage = storage = FolderStorage(self._path, f"{engine.position}-{attempt}")
        writers = {part: ranks[0] for part, ranks in part_writers(held_by, [("", "")] * len(held_by), 0).items()}
        records, held = [], None
        if own:
            engine.fault("collect", engine.step)
            held = self._held()
            for number, (part, writer) in enumerate(writers.items()):
                if writer == rank:
                    storage.begin()
                    pieces = ((each.staged(), each.data.cpu().clone()) for each in held.tensors[part])
                    records.append(write_part(storage, number, rank, pieces))
            engine.fault("checkpoint", engine.step)
        described = self.gather(engine, msgspec.json.encode(records), " written")
        if held is not None and rank == min(writers.values()):
            self._finish(storage, [msgspec.json.decode(each, type=list[WrittenPart]) for each in described], held)

    def _finish(self, storage: FolderStorage, described: Sequence[Sequence[WrittenPart]], held: HeldCheckpoint) -> None:
        records = [record for each in described for record in each]
        pieces = [piece for record in records for piece in record.pieces]
        digests = publish(storage, pieces, held.objects, held.files, held.places)
        for record in records:
            digests |= record.digests
        self.digest = total(digests)
        self._done(self.digest)
