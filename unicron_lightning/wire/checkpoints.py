"""Messages about checkpoints: what a task has written, and from what it may resume."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from unicron_lightning.wire.fields import Count, Id, Message, Path

Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
"""A SHA-256 in hexadecimal digits."""


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A complete persistent checkpoint, as a worker has reported it."""

    path: Path
    """Absolute path, or a URL."""
    step: Count
    """Optimizer steps finished in it."""
    digest: Digest
    """Digest of what was written: of the file, or of a folder's manifest (`checkpoints.files`)."""
    life: Count
    """Life of the task in which it was written."""
    bytes: Count | None = None
    """Size of its files; None if it is not known."""
    fit: Count = 1
    """Number of the script's ``fit`` in which it was written: each counts its own steps."""


class CheckpointSaved(Message, frozen=True, kw_only=True, tag="checkpoint_saved"):
    """A persistent checkpoint is complete at ``path`` and holds the state after ``step`` optimizer steps.

    The other fields are those of `Checkpoint`. ``parting``: all members wait to be restarted from it; see `wire.Epoch`
    of the kinds in `PARTING`.
    """

    worker: Id
    path: Path
    step: Count
    digest: Digest
    bytes: Count | None = None
    fit: Count = 1
    parting: bool = False
