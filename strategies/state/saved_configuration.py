"""The file that `LightningCLI` writes when a run begins: only a new life of the same task overwrites it."""

from __future__ import annotations

import sys
from typing import Any, Final

import lightning.pytorch as pl

from unicron_lightning import wire
from unicron_lightning.worker.control.thread import Control

_RECORD: Final = "configuration"
"""Record of the fact that a worker of this task has saved its configuration."""


def accept_own(trainer: pl.Trainer, control: Control | None) -> None:
    """Let ``SaveConfigCallback`` overwrite what an earlier life of the task has written, before it looks."""
    savers = _savers(trainer)
    if savers and control is not None and control.welcome.life > 1 and control.lookup(_RECORD) is not None:
        for saver in savers:
            saver.overwrite = True


def note_saved(trainer: pl.Trainer, control: Control | None) -> None:
    """Record that this task has saved its configuration, after ``SaveConfigCallback`` has."""
    if control is not None and any(saver.already_saved for saver in _savers(trainer)):
        control.send(wire.Record(key=_RECORD, value="saved", lasting=True))


def _savers(trainer: pl.Trainer) -> list[Any]:
    command_line = sys.modules.get("lightning.pytorch.cli")
    if command_line is None:  # then there is none
        return []
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [each for each in callbacks if isinstance(each, command_line.SaveConfigCallback)]
