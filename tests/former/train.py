"""Trains a small model, and keeps checkpoints of both kinds at its fourth step: ``FOLDER STEPS [CKPT_PATH]``.

It writes FOLDER/result.json: the parameters and the number of uses of each sample at the end. While FOLDER/hold exists
it waits after that step.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from unicron_lightning import UnicronStrategy
from unicron_lightning.callbacks import UnicronCheckpoint

SAVED: Final = 4
"""Step at which checkpoints are written."""
SAMPLES: Final = 24


class Model(pl.LightningModule):
    """Has dropout, a statistic, and a parameter that counts the uses of each sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.2), nn.Linear(3, 1))
        self.uses = nn.Parameter(torch.zeros(SAMPLES))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        numbers, x = batch
        loss = self.layers(x).square().mean() + self.uses[numbers].sum()
        self.log("loss", loss, on_step=True)
        return loss

    def configure_optimizers(self) -> Any:
        first = {"params": self.layers.parameters(), "lr": 0.01}
        optimizer = torch.optim.AdamW([first, {"params": [self.uses], "weight_decay": 0.0}], lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


class Hold(pl.Callback):
    """Waits after a step, until a file is gone."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        while trainer.global_step == SAVED and self._path.exists():
            time.sleep(0.05)


def train(folder: Path, steps: int, path: Path | None) -> None:
    """Train up to a number of steps, from a checkpoint if a path is given."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    pl.seed_everything(5, verbose=False)
    x = torch.randn(SAMPLES, 2, generator=torch.Generator().manual_seed(2))
    data = DataLoader(TensorDataset(torch.arange(SAMPLES), x), batch_size=4, shuffle=True)
    trainer = pl.Trainer(
        strategy=UnicronStrategy(num_micro_batches=2),
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        precision="64-true",
        max_steps=steps,
        callbacks=[
            ModelCheckpoint(folder, "whole", every_n_train_steps=SAVED, save_top_k=-1),
            UnicronCheckpoint(folder / "parts", every_n_train_steps=SAVED),
            Hold(folder / "hold"),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    module = Model()
    trainer.fit(module, data, ckpt_path=path)
    if trainer.is_global_zero:
        result = {name: value.flatten().tolist() for name, value in module.state_dict().items()}
        (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]) if sys.argv[3:] else None)
