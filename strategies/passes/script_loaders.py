"""Ordinary loaders for the user's script, as under ddp.

Lightning's loops iterate over the strategy's loaders, and each iteration is a step or a pass of the task.
``trainer.val_dataloaders`` and similar properties return the loader that Lightning would have made under ddp instead: a
callback may iterate over it, or read its attributes, without any effect on training.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import lightning.pytorch as pl
from lightning.pytorch.loops import _EvaluationLoop
from lightning.pytorch.trainer.connectors.data_connector import _get_distributed_sampler
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.data import _is_dataloader_shuffled, _update_dataloader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils._pytree import tree_unflatten
from torch.utils.data import DataLoader, DistributedSampler

from unicron_lightning.data.loader import InPlace

_STAGES: Final = {
    "train": RunningStage.TRAINING,
    "val": RunningStage.VALIDATING,
    "test": RunningStage.TESTING,
    "predict": RunningStage.PREDICTING,
}
"""By the prefix of their methods for data."""


def ordinary(trainer: pl.Trainer, loader: DataLoader[Any], devices: int, rank: int) -> DataLoader[Any]:
    """Return the loader of one device of the declared world, as under ddp; the user's own if that can't be made.

    Args:
        trainer: provides the present stage.
        loader: the user's loader.
        devices: devices of the declared world.
        rank: this worker's rank when the loader is made.
    """
    if isinstance(loader.sampler, DistributedSampler):
        return loader
    stage = trainer.state.stage
    assert stage is not None
    overfits: float = trainer.overfit_batches  # type: ignore[attr-defined]
    shuffled = stage == RunningStage.TRAINING or _is_dataloader_shuffled(loader)
    try:
        sampler = _get_distributed_sampler(loader, shuffled, overfits, stage, num_replicas=devices, rank=rank % devices)
        made: DataLoader[Any] = _update_dataloader(loader, sampler, mode=stage)
    except (MisconfigurationException, TypeError, AssertionError):  # unknown arguments; fewer samples than devices
        return loader
    return made


@contextmanager
def loading(trainer: pl.Trainer, prefix: str) -> Iterator[None]:
    """Inside, the trainer is in the stage whose data is loaded: searches load validation data while they train.

    Args:
        trainer: of the run.
        prefix: of the stage's method, such as ``val``; "" if unknown.
    """
    before = trainer.state.stage
    if before is not None and before.dataloader_prefix != prefix in _STAGES:
        trainer.state.stage = _STAGES[prefix]
    try:
        yield
    finally:
        trainer.state.stage = before


def evaluation_loops(trainer: pl.Trainer) -> tuple[_EvaluationLoop, ...]:
    """Return all loops of a trainer that run validations or tests."""
    return trainer.validate_loop, trainer.test_loop, trainer.fit_loop.epoch_loop.val_loop


def leave_ordinary(trainer: pl.Trainer) -> None:
    """Leave the ordinary loaders of the training data to the loop after a run: its state has none of the strategy's."""
    combined: CombinedLoader | None = trainer.fit_loop._combined_loader
    if combined is not None:
        leaves = [each.ordinary if isinstance(each, InPlace) else each for each in combined.flattened]
        made = CombinedLoader(tree_unflatten(leaves, combined._spec), combined._mode)
        made.limits = combined.limits
        trainer.fit_loop._combined_loader = made


def show_ordinary(trainer: pl.Trainer) -> None:
    """Make the trainer's properties return the ordinary loaders, while its loops keep those of the strategy."""
    loops: tuple[Any, ...] = trainer.fit_loop, *evaluation_loops(trainer), trainer.predict_loop
    for loop in loops:
        combined: CombinedLoader | None = loop._combined_loader
        if combined is not None:
            leaves = [each.ordinary if isinstance(each, InPlace) else each for each in combined.flattened]
            combined._iterables = tree_unflatten(leaves, combined._spec)
