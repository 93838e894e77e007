"""Keeps the state of training in the memory of the agents, which survive their workers."""

from __future__ import annotations

import lightning.pytorch as pl
from typing_extensions import override

from unicron_lightning.callbacks.strategy import engine_of
from unicron_lightning.errors import ConfigError
from unicron_lightning.strategies.fault_tolerant import FaultTolerantStrategy


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
        engine_of(trainer, self)
        strategy = trainer.strategy
        assert isinstance(strategy, FaultTolerantStrategy)
        strategy.memory.use(self.every_n_steps, self.partners)
