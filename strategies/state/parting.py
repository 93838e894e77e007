"""The end of a life whose task pauses, or continues in another layout: a checkpoint between two steps, and a wait."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import lightning.pytorch as pl
import msgspec

from unicron_lightning.strategies.console import say_saved
from unicron_lightning.strategies.state.join_state import WHOLE
from unicron_lightning.worker import codec
from unicron_lightning.worker.control.thread import terminable
from unicron_lightning.worker.operations import Parting

if TYPE_CHECKING:
    from unicron_lightning.strategies.fault_tolerant import FaultTolerantStrategy


_OTHERS_SECONDS: Final = 5.0
"""Seconds for checkpoints that are written beside the training; without them the state is saved all the same."""


def part(strategy: FaultTolerantStrategy, trainer: pl.Trainer, state: dict[str, Any]) -> None:
    """Write the checkpoint and wait; the process is stopped once the coordinator has received the report.

    From here on SIGTERM ends the process immediately, whatever handler Lightning has installed. Nothing is lost by it:
    the state is in this checkpoint, or in that of the other workers, which continue without this one.

    Args:
        strategy: at a step boundary, as on all other members.
        trainer: its trainer.
        state: state for a joiner.
    """
    engine, control = strategy.engine, strategy.engine.control
    assert control is not None
    # Lightning's `ckpt_path="last"` finds that of a pause if the folder is that of the next task, too.
    name = "last-pause" if engine.world.kind == "pause" else engine.world.kind
    path = _folder(trainer) / f"{name}-step={trainer.global_step}.ckpt"
    rest = {key: value for key, value in state.items() if key != "checkpoint"}
    with terminable(), engine.activity.during("checkpoint"):
        strategy.save_checkpoint({**state["checkpoint"], WHOLE: codec.encode(rest)}, path)
        word = msgspec.structs.replace(strategy.reported.saved[str(path)], parting=True)
        for logger in trainer.loggers:
            logger.save()
        say_saved(trainer, engine.world, path)
        strategy.persisting.finish(_OTHERS_SECONDS)
        engine.run(Parting(lambda: control.send(word)))


def _folder(trainer: pl.Trainer) -> Path:
    """Return the trainer's folder of checkpoints."""
    own = getattr(trainer.checkpoint_callback, "dirpath", None)
    return Path(own or Path(trainer.default_root_dir) / "checkpoints").absolute()
