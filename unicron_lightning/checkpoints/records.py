"""Complete checkpoints of which no worker may have reported, as files in the agent's private folder.

What completes a checkpoint leaves a record there before it notifies anybody: a worker, or its writer, which outlives
it. If all workers die or fail before their reports arrive, those of the next life find the records of their agents. A
record has the digest, so that the checkpoint is checked as one that was reported. The agent reports the record of a
worker that dies, since it may not run a worker of the next life at its start; what a writer completes later is found.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from unicron_lightning import wire
from unicron_lightning.regular_files import read_regular
from unicron_lightning.worker.checkpoint_files import digest_of, size_of

logger = logging.getLogger(__name__)

_PREFIX: Final = "complete-"


def record_path(folder: Path, pid: int | None = None) -> Path:
    """Return where a worker (None: this one), and its writer, leave the record of their newest checkpoint.

    Args:
        folder: of the agent.
        pid: the worker's process.
    """
    return folder / f"{_PREFIX}{os.getpid() if pid is None else pid}"


def leave_record(place: Path, path: str, step: int, digest: str, fit: int) -> None:
    """Leave the record of a complete checkpoint, in place of the one before.

    Args:
        place: of the record, see `record_path`.
        path: of the checkpoint, or its URL.
        step: optimizer steps finished in it.
        digest: of the checkpoint.
        fit: of the script, in which it was written.

    Raises:
        OSError: the folder is gone, or cannot be written to.
    """
    found = wire.Checkpoint(path=path, step=step, digest=digest, life=0, bytes=size_of(path), fit=fit)
    partial = place.with_suffix(f".{os.getpid()}")
    partial.write_bytes(msgspec.json.encode(found))
    partial.rename(place)


def record_of(folder: Path, pid: int) -> wire.Checkpoint | None:
    """Return the newest checkpoint that a worker of an agent has completed, unread; None without a record."""
    try:
        return msgspec.json.decode(read_regular(record_path(folder, pid)), type=wire.Checkpoint)
    except (OSError, msgspec.MsgspecError):
        return None


def left_records(folder: Path, reported: Sequence[wire.Checkpoint]) -> list[wire.Checkpoint]:
    """Return the checkpoints in an agent's records that are newer than those reported, and as they were written."""
    newest = min(map(age, reported), default=(0, 0))
    found: list[wire.Checkpoint] = []
    for place in folder.glob(f"{_PREFIX}*"):
        try:
            checkpoint = msgspec.json.decode(read_regular(place), type=wire.Checkpoint)
            if age(checkpoint) < newest and checkpoint not in found and digest_of(checkpoint.path) == checkpoint.digest:
                found.append(checkpoint)
        except Exception as error:  # noqa: BLE001 - a storage's package raises errors of its own
            logger.info("checkpoint_record_left_out record=%s reason=%s", place, error)
    return sorted(found, key=age)


def age(checkpoint: wire.Checkpoint) -> tuple[int, int]:
    """Return a key by which checkpoints are sorted, newest first."""
    return -checkpoint.fit, -checkpoint.step
