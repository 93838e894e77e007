"""Fits of a sharded model in one process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import TensorDataset

from unicron_lightning import UnicronFSDPStrategy, UnicronStrategy
from unicron_lightning.errors import ConfigError
from unicron_lightning.fsdp.mesh import local_shards

sys.path.insert(0, str(Path(__file__).parents[1]))

from programs.several_fits import Net, data
from programs.short_steps import Linear, fit


def fitted(folder: Path, strategy: Any, fits: int) -> tuple[pl.Trainer, Net]:
    """Fit several times, each time with another rate."""
    options: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, enable_model_summary=False, default_root_dir=folder, **options
    )
    module = Net()
    for number in range(fits):
        module.rate, trainer.fit_loop.max_epochs = 0.02 / (1 + number), 2 * (1 + number)
        trainer.fit(module, data(20), data(8))
    return trainer, module


def beside_a_whole_model(rank: int, world: int, folder: Path) -> Any:
    """Steps, and largest difference of the parameters, after three fits."""
    (ours, sharded), (plain, module) = (
        fitted(folder, each, 3) for each in (UnicronFSDPStrategy(shard_size=1), UnicronStrategy())
    )
    pairs = zip(local_shards(sharded.parameters()), module.parameters(), strict=True)
    return [ours.global_step, plain.global_step, max(float((a - b).abs().max()) for a, b in pairs)]


def from_a_checkpoint(rank: int, world: int, folder: Path, *, evaluates: bool) -> Any:
    """The error of a further fit with a checkpoint, or after an evaluation with it."""
    trainer, module = fitted(folder, UnicronFSDPStrategy(shard_size=1), 1)
    trainer.save_checkpoint(path := folder / "saved.ckpt")
    if evaluates:
        trainer.validate(module, data(8), ckpt_path=path, verbose=False, weights_only=True)
    try:
        trainer.fit(module, data(20), ckpt_path=None if evaluates else path, weights_only=True)
    except ConfigError as error:
        return str(error)
    return None


def short_step(rank: int, world: int, folder: Path) -> Any:
    """Changes of a parameter in a step of eight samples and one of a single sample."""
    module = Linear()
    fit(module, TensorDataset(torch.full((9,), 2.0)), 8, 1, UnicronFSDPStrategy(shard_size=1))
    return module.steps
