"""Batch samplers of the user with another number of batches in each epoch, as by a budget of tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from unicron_lightning.errors import ConfigError

SAMPLES, DEVICES = 24, 2
BUDGETS = (4, 8, 3)
"""Samples of a batch, by epoch: 6, 3 and 8 batches."""


class Budget:
    """Its length is that of the present epoch, or the first one's for ever."""

    def __init__(self, *, right: bool) -> None:
        self.right = right
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return SAMPLES // BUDGETS[self.epoch if self.right else 0]

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        size = BUDGETS[self.epoch]
        return iter([order[start : start + size] for start in range(0, SAMPLES, size)])


class Counting(pl.LightningModule):
    """Counts the samples of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.used: Counter[tuple[int, int]] = Counter()
        self.validated: Counter[tuple[int, int]] = Counter()
        self.steps: Counter[int] = Counter()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (samples,) = batch if isinstance(batch, list) else batch["first"]
        self.used.update((self.current_epoch, int(sample)) for sample in samples)
        return self.layer(samples[:, None]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.validated.update((self.current_epoch, int(sample)) for sample in batch[0])

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps[self.current_epoch] += 1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def loader(*, right: bool = True) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(float(SAMPLES))), batch_sampler=Budget(right=right))  # type: ignore[arg-type]


def fit(
    module: Counting, data: Any, *callbacks: pl.Callback, validation: Any = None, path: Any = None, **given: Any
) -> pl.Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    settings = {"max_epochs": len(BUDGETS), "devices": 1, "num_nodes": DEVICES, "limit_val_batches": 0} | quiet | given
    trainer = pl.Trainer(
        strategy="unicron",
        accelerator="cpu",
        callbacks=list(callbacks),
        enable_checkpointing=bool(callbacks),
        **settings,
    )
    trainer.fit(module, data, validation or DataLoader(range(2)), ckpt_path=path, weights_only=True)
    return trainer


EACH_ONCE = {(epoch, sample): 1 for epoch in range(len(BUDGETS)) for sample in range(SAMPLES)}


@pytest.mark.parametrize("right", [True, False])
def test_each_sample_is_used_once_in_each_epoch(*, right: bool) -> None:
    module = Counting()
    fit(module, loader(right=right))
    assert module.used == EACH_ONCE
    assert module.steps == {0: 3, 1: 2, 2: 4}


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize("step", [2, 3, 4, 5, 6, 8])
def test_resumed_anywhere(tmp_path: Path, step: int) -> None:
    first, rest = Counting(), Counting()
    more: dict[str, Any] = {"every_n_train_steps": 1, "save_top_k": -1}
    fit(first, loader(), ModelCheckpoint(tmp_path, "{step}", **more), max_steps=step)
    fit(rest, loader(), ModelCheckpoint(tmp_path, "{step}", **more), path=tmp_path / f"step={step}.ckpt")
    assert first.used + rest.used == EACH_ONCE


def test_limit_counts_in_each_epoch() -> None:
    module = Counting()
    fit(module, loader(), limit_train_batches=2)
    assert module.steps == {0: 2, 1: 2, 2: 2}


def test_validation_as_under_ddp() -> None:
    """Lightning takes the number of batches when it sets up the data: at most so many are run."""
    module = Counting()
    fit(module, loader(), validation=loader(), limit_val_batches=1.0, max_epochs=2)
    assert module.validated == {(epoch, sample): 1 for epoch in range(2) for sample in range(SAMPLES)}


def test_several_loaders_need_the_same_number() -> None:
    data = CombinedLoader({"first": loader(), "second": DataLoader(range(4))}, "max_size")
    with pytest.raises(ConfigError, match="loader 0 yields 3 batches in epoch 1 and 6 in the first one"):
        fit(Counting(), data)
