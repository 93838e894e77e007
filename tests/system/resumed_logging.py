"""A training by one worker that logs to a CSV file of a chosen version; the worker dies once, after a checkpoint."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

STEPS = 24


class Line(pl.LightningModule):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.folder = folder

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *about: Any) -> None:
        if self.trainer.global_step == 15 and not (self.folder / "killed").exists():
            (self.folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main() -> None:
    folder = Path(sys.argv[1])
    pl.seed_everything(1, verbose=False)
    trainer = pl.Trainer(
        strategy="unicron",
        accelerator="cpu",
        devices=1,
        max_steps=STEPS,
        logger=CSVLogger(folder, name="logs", version=0, flush_logs_every_n_steps=1),
        log_every_n_steps=1,
        callbacks=[ModelCheckpoint(folder / "saved", every_n_train_steps=6)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Line(folder), DataLoader(TensorDataset(torch.randn(32, 2)), batch_size=4))


if __name__ == "__main__":
    main()
