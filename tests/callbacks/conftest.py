"""A small training in a world of one, with several micro-batches per step."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, BATCH, MICRO_BATCHES = 40, 2, 4


class Net(pl.LightningModule):
    """One layer; its FLOPs are invented."""

    flops_per_step = 3e9

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.layer(batch[0]) - batch[1]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", (self.layer(batch[0]) - batch[1]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.fixture
def rows(tmp_path: Path) -> Callable[[], list[dict[str, float]]]:
    """Return the lines logged so far, each with the columns that have values."""
    path = tmp_path / "csv/version_0/metrics.csv"

    def read() -> list[dict[str, float]]:
        if not path.exists():
            return []
        with path.open(newline="") as file:
            return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]

    return read


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., pl.Trainer]:
    """Return a function that trains with given callbacks: five steps per pass over the data, a validation after
    each.
    """

    def run(callbacks: Sequence[pl.Callback], strategy: Any = "unicron", **settings: Any) -> Any:
        logger = CSVLogger(tmp_path, name="csv", version=0)
        chosen: dict[str, Any] = {
            "logger": logger,
            "accumulate_grad_batches": MICRO_BATCHES,
            "max_epochs": 2,
            "log_every_n_steps": 2,
        }
        chosen |= {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        trainer = pl.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=1,
            callbacks=list(callbacks),
            default_root_dir=tmp_path,
            **chosen | settings,
        )
        data = TensorDataset(torch.randn(SAMPLES, 4), torch.randn(SAMPLES, 1))
        trainer.fit(Net(), DataLoader(data, batch_size=BATCH), DataLoader(data, batch_size=BATCH))
        return trainer

    return run
