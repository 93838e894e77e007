"""Trains with another learning rate on node n1, and to the end once the file ``finish`` exists."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from unicron_lightning import environ


class Line(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(0.05)
        loss: Tensor = self.layer(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        rate = 0.02 if "n1-" in environ.read().worker else 0.01
        return torch.optim.SGD(self.parameters(), lr=rate)


class Ends(pl.Callback):
    def on_train_epoch_end(self, trainer: pl.Trainer, *about: Any) -> None:
        trainer.should_stop = bool(trainer.strategy.broadcast((Path(sys.argv[1]) / "finish").exists(), 0))


def main() -> None:
    pl.seed_everything(1, verbose=False)
    data = DataLoader(TensorDataset(torch.randn(40, 2)), batch_size=4)
    trainer = pl.Trainer(
        strategy="unicron",
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Ends()],
    )
    trainer.fit(Line(), data)


if __name__ == "__main__":
    main()
