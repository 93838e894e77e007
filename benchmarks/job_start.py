"""A small training that notes each of its steps in FOLDER/steps: process and time. ``job_start.py FOLDER``."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

FOLDER = Path(sys.argv[1])
STEP_SECONDS = 0.05


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        time.sleep(STEP_SECONDS)
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Notes(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        with (FOLDER / "steps").open("a") as file:
            file.write(f"{os.getpid()} {time.time()}\n")
        trainer.should_stop = (FOLDER / "stop").exists()


pl.seed_everything(1, verbose=False)
trainer = pl.Trainer(
    strategy="unicron", accelerator="cpu", devices=1, num_nodes=2, max_steps=100_000, logger=False, callbacks=[Notes()],
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(Model(), DataLoader(TensorDataset(torch.randn(40000, 8)), batch_size=4))
