"""Record of a task's checkpoints: those from which a new life may resume, newest first.

A path holds what was written there last, so a report replaces what is known of its path. Reports may come late and
several times, as all members send them. Workers check a checkpoint before they load it, so one that was changed or
deleted since may stay on record.
"""

from __future__ import annotations

from typing import Final

from unicron_lightning import wire
from unicron_lightning.coordinator.actions import Turn
from unicron_lightning.coordinator.state import Task

KEPT: Final = 8
"""Checkpoints on record: older ones matter only if newer ones were changed or are gone."""


def saved(task: Task, turn: Turn, message: wire.CheckpointSaved) -> None:
    """Record a checkpoint, unless it is known or something newer was written at its path in this life."""
    one = wire.Checkpoint(path=message.path, step=message.step, digest=message.digest, life=task.life)
    there = [known for known in task.checkpoints if known.path == one.path]
    if one in there or any(known.life == one.life and known.step > one.step for known in there):
        return
    # Two of the same step may both be there: which one was written last is not known.
    replaced = [known for known in there if (known.life, known.step) != (one.life, one.step)]
    kept = [known for known in task.checkpoints if known not in replaced]
    task.checkpoints = sorted([one, *kept], key=lambda known: -known.step)[:KEPT]
    fields = {"worker": message.worker, "path": one.path, "step": one.step, "digest": one.digest}
    turn.emit_for(task, None, "checkpoint_saved", fields)
