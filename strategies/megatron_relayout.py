"""The end of a life whose task is to go on in another layout: a checkpoint between two steps, and a wait."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

from unicron_lightning import wire
from unicron_lightning.strategies.join_state import WHOLE
from unicron_lightning.worker import codec
from unicron_lightning.worker.control import terminable
from unicron_lightning.worker.operations import Parting

if TYPE_CHECKING:
    from unicron_lightning.strategies.megatron import UnicronMegatronStrategy


def part(strategy: UnicronMegatronStrategy, trainer: pl.Trainer, state: dict[str, Any]) -> None:
    """Does not return: the process is stopped when the coordinator has heard of the checkpoint.

    SIGTERM ends the process at once from here on, whatever Lightning has made of it: all that there is is in the
    checkpoint, or in that of the others, who go on without this worker.

    Args:
        strategy: at a step boundary, as all other members' are.
        trainer: its.
        state: what a joiner would get.
    """
    engine, control = strategy.engine, strategy.engine.control
    assert control is not None
    path = _folder(trainer) / f"relayout-step={trainer.global_step}.ckpt"
    rest = {key: value for key, value in state.items() if key != "checkpoint"}
    word = wire.CheckpointSaved(worker=control.worker, path=str(path), step=trainer.global_step, parting=True)
    with terminable(), engine.activity.during("checkpoint"):
        strategy.save_checkpoint({**state["checkpoint"], WHOLE: codec.encode(rest)}, path)
        for logger in trainer.loggers:
            logger.save()
        engine.run(Parting(lambda: control.send(word)))


def _folder(trainer: pl.Trainer) -> Path:
    """Where the trainer keeps checkpoints."""
    own = getattr(trainer.checkpoint_callback, "dirpath", None)
    return Path(own or Path(trainer.default_root_dir) / "checkpoints").absolute()
