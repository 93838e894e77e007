"""Trains with the default logger and checkpoints; the worker of n2 begins once the first one has opened a folder."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from unicron_lightning import environ

FOLDER = Path(sys.argv[1])
LATE = "n2-" in environ.read().worker


class Line(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(0.05)
        loss: Tensor = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Meets(pl.Callback):
    """Begin apart, and train until all nodes have taken part in a few steps."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave time between the logger's folder and that of the checkpoints, except on n2."""
        (FOLDER / "opened").touch()
        if not LATE:
            time.sleep(2.0)

    def on_train_batch_end(self, trainer: pl.Trainer, *about: object) -> None:
        whole = trainer.world_size == 3 and trainer.global_step % 10 == 0
        if whole or trainer.global_step >= 400:
            trainer.should_stop = True


def main() -> None:
    while LATE and not (FOLDER / "opened").exists():
        time.sleep(0.01)
    pl.seed_everything(1, verbose=False)
    data = DataLoader(TensorDataset(torch.randn(4000, 2)), batch_size=4)
    trainer = pl.Trainer(
        strategy="unicron",
        accelerator="cpu",
        devices=1,
        num_nodes=3,
        default_root_dir=FOLDER / "out",
        max_epochs=1,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Meets(), ModelCheckpoint(every_n_train_steps=5, save_top_k=-1)],
    )
    trainer.fit(Line(), data)
    checkpoint = trainer.checkpoint_callback
    assert isinstance(checkpoint, ModelCheckpoint)
    (FOLDER / f"dirpath-{environ.read().worker.partition('-')[0]}").write_text(str(checkpoint.dirpath))


if __name__ == "__main__":
    main()
