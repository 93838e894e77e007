"""Callbacks that keep the state of training: in the memory of the agents, and in checkpoints beside the training."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any
from weakref import proxy

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from unicron_lightning.errors import ConfigError
from unicron_lightning.strategies.fault_tolerant import strategy_of


class MemoryCheckpoint(pl.Callback):
    """Stages the training's state in shared memory at step boundaries, and hands it to this node's agent.

    If all workers of the task die, their successors resume from there instead of a checkpoint on disk, if that is
    older. Each worker stages a share of the state or of its shard, and shares of other workers: docs/state.md.

    Args:
        every_n_steps: optimizer steps between two versions; at most so many are lost.
        partners: copies of each share on other nodes: so many nodes may be lost together with all workers.

    Raises:
        ConfigError: an argument is out of range, or (at the start) the strategy is none of this project's.
    """

    def __init__(self, every_n_steps: int = 10, partners: int = 1) -> None:
        if every_n_steps < 1:
            raise ConfigError(f"MemoryCheckpoint(every_n_steps={every_n_steps}): expected at least 1")
        if partners < 0:
            raise ConfigError(f"MemoryCheckpoint(partners={partners}): expected 0 or more")
        self.every_n_steps = every_n_steps
        self.partners = partners

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy_of(trainer, self).memory.use(self.every_n_steps, self.partners)


class UnicronCheckpoint(ModelCheckpoint):
    """Writes the checkpoints of ModelCheckpoint beside the training, by all workers in parallel: see docs/state.md.

    The training thread copies this worker's part into shared memory, and a process of its own writes it. A checkpoint
    is a folder in the format of `torch.distributed.checkpoint`, with ``unicron_megatron`` in Megatron's. Checkpoints
    that are replaced are removed once their successor is complete. If a save fails, there is a warning and an event,
    and training continues.

    Args:
        options: of ModelCheckpoint.
        partners: workers on other nodes that also copy each part, and write it if its node is lost.
        overlap: copy parameters and states of optimizers while the next gradients are computed; the optimizer waits for
            that. If hooks change them in between, by tensors' ``.data`` or otherwise, set it to False.
        named_options: of ModelCheckpoint.

    Raises:
        ConfigError: ``partners`` is negative, or (at the start) the strategy is none of this package, or is
            ``unicron_megatron`` with a URL.
    """

    def __init__(self, *options: Any, partners: int = 1, overlap: bool = True, **named_options: Any) -> None:
        if partners < 0:
            raise ConfigError(f"UnicronCheckpoint(partners={partners}): expected 0 or more")
        super().__init__(*options, **named_options)
        self.partners = partners
        self.overlap = overlap
        self._complete = 0
        """Checkpoints of which the loggers have not been notified."""

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        strategy = strategy_of(trainer, self)
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            strategy.persisting.use(str(self.dirpath), self.partners, overlap=self.overlap)

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._notify(trainer)

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._notify(trainer)  # all checkpoints are complete

    @override
    def file_exists(self, filepath: Any, trainer: pl.Trainer) -> bool:
        pending = strategy_of(trainer, self).persisting.pending(filepath)
        there = trainer.is_global_zero and (pending or self._fs.exists(filepath))
        return trainer.strategy.reduce_boolean_decision(there, all=False)

    @override
    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        strategy = strategy_of(trainer, self)
        if strategy.collectives.interrupted():
            super()._save_checkpoint(trainer, filepath)
            return
        strategy.persisting.save(trainer, filepath, weights_only=self.save_weights_only)
        strategy.persisting.after(self._count)
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = filepath

    def _link_checkpoint(self, trainer: pl.Trainer, filepath: str, linkpath: str) -> None:  # type: ignore[override]
        strategy_of(trainer, self).persisting.after(partial(_link, trainer, Path(filepath), Path(linkpath)))

    @override
    def _remove_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        strategy_of(trainer, self).persisting.remove(filepath)

    def _count(self) -> None:
        self._complete += 1

    def _notify(self, trainer: pl.Trainer) -> None:
        complete, self._complete = self._complete, 0
        if complete and trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.after_save_checkpoint(proxy(self))


def _link(trainer: pl.Trainer, target: Path, link: Path) -> None:
    if not trainer.is_global_zero or target.absolute() == link.absolute():
        return
    if link.is_dir() and not link.is_symlink():
        shutil.rmtree(link)
    else:
        link.unlink(missing_ok=True)
    link.symlink_to(os.path.relpath(target, link.parent))
