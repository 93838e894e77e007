"""Fits of a sharded model in one process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import TensorDataset

from unicron_lightning import UnicronFSDPStrategy, UnicronStrategy
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
    ours, plain = (fitted(folder, each, 3) for each in (UnicronFSDPStrategy(shard_size=1), UnicronStrategy()))
    return _beside(ours, plain)


def from_a_checkpoint(rank: int, world: int, folder: Path, *, evaluates: bool) -> Any:
    """The same after a fit that returns to the checkpoint of an earlier one, perhaps after an evaluation of it."""
    found = []
    for number, strategy in enumerate((UnicronFSDPStrategy(shard_size=1), UnicronStrategy())):
        trainer, module = fitted(folder, strategy, 1)
        trainer.save_checkpoint(path := folder / f"saved{number}.ckpt")
        trainer.fit_loop.max_epochs = 4
        trainer.fit(module, data(20), data(8))
        if evaluates:
            trainer.validate(module, data(8), ckpt_path=path, verbose=False, weights_only=True)
        trainer.fit_loop.max_epochs = 5
        trainer.fit(module, data(20), data(8), ckpt_path=None if evaluates else path, weights_only=True)
        found.append((trainer, module))
    return _beside(*found)


def _beside(ours: tuple[pl.Trainer, Net], plain: tuple[pl.Trainer, Net]) -> Any:
    pairs = zip(local_shards(ours[1].parameters()), plain[1].parameters(), strict=True)
    steps = [trainer.global_step for trainer, _ in (ours, plain)]
    return [*steps, max(float((a - b).abs().max()) for a, b in pairs)]


def short_step(rank: int, world: int, folder: Path) -> Any:
    """Changes of a parameter in a step of eight samples and one of a single sample."""
    module = Linear()
    fit(module, TensorDataset(torch.full((9,), 2.0)), 8, 1, UnicronFSDPStrategy(shard_size=1))
    return module.steps
