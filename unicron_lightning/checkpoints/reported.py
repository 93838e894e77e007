"""Checkpoints that the coordinator knows: reported once written, and checked before a task resumes from them."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import msgspec
import torch

from unicron_lightning import wire
from unicron_lightning.checkpoints.files import HashingFile, OpenCheckpoint, leave_record, size_of, total
from unicron_lightning.errors import ConfigError
from unicron_lightning.worker.codec import unpack_parts
from unicron_lightning.worker.control.thread import Control
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.operations import Agreement
from unicron_lightning.worker.session import Session

logger = logging.getLogger(__name__)


class CheckpointsChanged(ConfigError):
    """No known checkpoint of the task is as it was written; the message names the newest and both digests."""


class _Seen(msgspec.Struct):
    """A rank's view of a checkpoint."""

    digests: dict[str, str] = {}
    error: str = ""


class ReportedCheckpoints:
    """Checkpoints that the coordinator knows, from which the task resumes if no worker survives.

    Attributes:
        saved: the last report of each path.
        fit: number of the script's present ``fit``.
    """

    def __init__(self) -> None:
        self.fit = 1
        self.saved: dict[str, wire.CheckpointSaved] = {}
        self._opened: OpenCheckpoint | None = None

    def report(self, engine: Engine, checkpoint: dict[str, Any], path: str, digest: str) -> None:
        """Report a checkpoint that was written."""
        control = engine.control
        if control is None or "optimizer_states" not in checkpoint:
            return
        if not digest:
            logger.warning("checkpoint_not_reported path=%s reason=it cannot be read after writing", path)
            return
        self.written(control, path, int(checkpoint["global_step"]), digest)

    def leave_record(self, session: Session, checkpoint: dict[str, Any], path: str, digest: str) -> None:
        """Leave the record of a checkpoint that this worker has written, as all may die before it is reported."""
        if session.record and digest and "optimizer_states" in checkpoint:
            leave_record(Path(session.record), path, int(checkpoint["global_step"]), digest, self.fit)

    def written(self, control: Control | None, path: str, step: int, digest: str) -> None:
        """Report a complete checkpoint; for all workers, as the first may die now."""
        if control is not None:
            self.saved[path] = wire.CheckpointSaved(
                worker=control.worker, path=path, step=step, digest=digest, bytes=size_of(path), fit=self.fit
            )
            control.send(self.saved[path])

    def resumed(self, engine: Engine, checkpoint: wire.Checkpoint, name: str) -> None:
        """Report that the task has resumed from a checkpoint; also the checkpoint, if it was found by its record."""
        if not checkpoint.life:
            self.written(engine.control, checkpoint.path, checkpoint.step, checkpoint.digest)
        if engine.control is not None and engine.world.rank == 0:
            engine.control.event("state_restored", tier="disk", step=checkpoint.step, path=name)

    def readable(self, path: Any) -> Any:
        """Return the path under which a checkpoint is read: one that was checked is held open."""
        return self._opened.path if self._opened is not None and self._opened.name == str(path) else path


@contextmanager
def newest(
    engine: Engine, known: Sequence[wire.Checkpoint], *, divided: bool
) -> Iterator[tuple[OpenCheckpoint, wire.Checkpoint]]:
    """Hold the first of some checkpoints open that all ranks find as it was written, and yield it with what is known.

    For all ranks together.

    Args:
        engine: has state.
        known: checkpoints of the task, newest first.
        divided: whether each rank reads its part of the files, and so a part of a folder; otherwise each reads all.

    Raises:
        CheckpointsChanged: there is none.
    """
    refused: list[str] = []
    for number, checkpoint in enumerate(known):
        opened, found = _look(engine, checkpoint, number, divided=divided)
        try:
            if found == checkpoint.digest and opened is not None:
                yield opened, checkpoint
                return
        finally:
            if opened is not None:
                opened.close()
        refused.append(f"{checkpoint.path} has {found}, expected {checkpoint.digest}")
        _report(engine, checkpoint, found)
    more = f" (and {len(refused) - 1} older: see checkpoint_rejected)" if refused[1:] else ""
    raise CheckpointsChanged(
        f"no checkpoint of the task is as it was written (SHA-256): {refused[0]}{more}. Restore one, or start a new "
        "task with ckpt_path"
    )


def _look(
    engine: Engine, checkpoint: wire.Checkpoint, number: int, *, divided: bool
) -> tuple[OpenCheckpoint | None, str]:
    """Open a checkpoint; return it with the digest on which all ranks agree, or an explanation."""
    opened, seen = None, _Seen()
    try:
        opened = OpenCheckpoint(checkpoint.path)
    except OSError as error:
        seen.error = str(error)

    def look(rank: int) -> bytes:
        part = (rank, engine.world.size) if divided else (0, 1)
        try:
            seen.digests = {} if opened is None else opened.digests(*part)
        except OSError as error:
            seen.error = str(error)
        return msgspec.json.encode(seen)

    said = engine.run(Agreement(f"checkpoint {number}", look))
    return opened, _agreed([msgspec.json.decode(part, type=_Seen) for part in unpack_parts(said)], divided=divided)


def _agreed(views: Sequence[_Seen], *, divided: bool) -> str:
    """Return the digest that all ranks have found, or an explanation."""
    if errors := [f"rank {rank}: {view.error}" for rank, view in enumerate(views) if view.error]:
        return errors[0]
    parts = {(name, digest) for view in views for name, digest in view.digests.items()}
    if divided and len(dict(parts)) == len(parts):  # not so if ranks see different files, each of which it reads whole
        return total(dict(parts))
    found = sorted({total(view.digests) for view in views})
    return found[0] if len(found) == 1 else f"{' and '.join(found)} on different ranks"


def _report(engine: Engine, checkpoint: wire.Checkpoint, found: str) -> None:
    fields = {"path": checkpoint.path, "step": checkpoint.step, "expected": checkpoint.digest, "found": found}
    logger.error("checkpoint_rejected path=%(path)s step=%(step)d expected=%(expected)s found=%(found)s", fields)
    if engine.control is not None and engine.world.rank == 0:
        engine.control.event("checkpoint_rejected", **fields)


def write_file(checkpoint: dict[str, Any], path: Path) -> str:
    """Write a file as Lightning does by default, such that it is complete once it is at its path; return its digest."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.unfinished")
    try:
        with unfinished.open("wb") as file:
            hashing = HashingFile(file)
            torch.save(checkpoint, cast("IO[bytes]", hashing))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return hashing.digest
