"""Trains on two nodes; all workers of the first life raise an error while a version of UnicronCheckpoint is written.

A worker of a further life writes the number of its first step.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from unicron_lightning import UnicronStrategy, environ
from unicron_lightning.callbacks import UnicronCheckpoint
from unicron_lightning.local_cluster.processes import until

FOLDER = Path(sys.argv[1])
BEFORE, RAISED = 3, 6


class Line(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def on_train_start(self) -> None:
        if (FOLDER / f"raised-{environ.read().node}").exists():
            (FOLDER / f"first-{environ.read().node}").write_text(str(self.global_step))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        raised = FOLDER / f"raised-{environ.read().node}"
        if self.global_step == RAISED and not raised.exists():
            raised.touch()
            raise RuntimeError("in the first life")
        loss: Tensor = self.layer(batch[0]).square().mean()
        return loss

    def on_train_batch_end(self, *about: Any) -> None:
        if self.global_step == RAISED - 1:
            until("the version before", (FOLDER / "saved" / f"step={BEFORE}.ckpt").exists, 60)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main() -> None:
    pl.seed_everything(1, verbose=False)
    trainer = pl.Trainer(
        strategy=UnicronStrategy(),
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        max_steps=10,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[UnicronCheckpoint(FOLDER / "saved", "{step}", every_n_train_steps=BEFORE)],
    )
    trainer.fit(Line(), DataLoader(TensorDataset(torch.randn(96, 2)), batch_size=4))


if __name__ == "__main__":
    main()
