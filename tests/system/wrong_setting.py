"""A script that the strategy refuses, with one error."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset


class Fetching(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, dataloader_iter: Iterator[list[Tensor]]) -> None:
        raise AssertionError("refused before")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


if __name__ == "__main__":
    with (Path(sys.argv[1]) / "starts").open("a") as file:
        file.write(f"{os.getpid()}\n")
    trainer = pl.Trainer(strategy="unicron", accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    trainer.fit(Fetching(), DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=4))
