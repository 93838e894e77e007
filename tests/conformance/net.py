"""The small module and the data of the scenarios."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def processes() -> int:
    """Number of processes of the world."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def dataset(number: int = 12, start: int = 1) -> TensorDataset:
    """Samples whose target is a sum; ``number`` for each process."""
    number *= processes()
    x = torch.randn(number, 3, generator=torch.Generator().manual_seed(start))
    return TensorDataset(x, x.sum(1, keepdim=True))


def loader(number: int = 12, **settings: Any) -> DataLoader[Any]:
    """Six batches of two for each process, in order."""
    return DataLoader(dataset(number), **{"batch_size": 2} | settings)


class Net(pl.LightningModule):
    """A linear model that logs its losses, and has data for every stage."""

    batches = 6

    def __init__(self, rate: float = 0.05) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layer = nn.Linear(3, 1)
        with torch.no_grad():
            self.layer.weight.copy_(torch.randn(1, 3, generator=generator))
            self.layer.bias.zero_()
        self.rate = rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return (self(x) - y).square().mean()

    def log(self, *args: Any, **options: Any) -> None:
        """Log; in a world of several processes the mean over all, as ``unicron`` always does."""
        if processes() > 1 and len(args) == 2:
            options["sync_dist"] = True
        super().log(*args, **options)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("val_loss", loss)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("test_loss", loss)
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate)

    def train_dataloader(self) -> Any:
        return loader(2 * self.batches)

    def val_dataloader(self) -> Any:
        return loader(6)

    def test_dataloader(self) -> Any:
        return loader(8)

    def predict_dataloader(self) -> Any:
        return loader(8)
