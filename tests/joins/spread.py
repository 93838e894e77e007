"""A worker of a task whose workers begin up to half a second apart: ``FOLDER NAME``. It notes where it would save.

The logger and the checkpoints have Lightning's defaults, so that their folder is a version that a worker chooses. In
the end rank 0 is killed, whose successor saves in the same folder.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
from conformance.net import Net
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from unicron_lightning import environ

WORKERS = 4
APART = 0.5
"""[s] between the starts of the first and the last worker, at most."""
STEPS = 40
KILLED_AT = 30


class Apart(pl.Callback):
    """Leave time between the choice of the logger's folder and that of the checkpoints, and kill rank 0.

    Args:
        folder: shared by all workers.
        seconds: for the pause.
    """

    def __init__(self, folder: Path, seconds: float) -> None:
        self._killed, self._seconds = folder / "killed", seconds

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        time.sleep(self._seconds)

    def on_train_batch_end(self, trainer: pl.Trainer, *about: object) -> None:
        time.sleep(0.02)
        if trainer.global_step >= KILLED_AT and trainer.global_rank == 0 and not self._killed.exists():
            self._killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, name: str) -> None:
    """Train, and note the folder of the checkpoints."""
    torch.set_num_threads(1)
    about = environ.read()
    draw = random.Random(f"{name} {about.node} {about.round}")
    time.sleep(draw.uniform(0, APART))
    trainer = pl.Trainer(
        strategy="unicron",
        accelerator="cpu",
        devices=1,
        num_nodes=WORKERS,
        default_root_dir=folder / "out",
        max_steps=STEPS,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Apart(folder, draw.uniform(0, APART)), ModelCheckpoint(every_n_train_steps=5, save_top_k=-1)],
    )
    data = DataLoader(
        TensorDataset(torch.ones(2 * WORKERS * STEPS, 3), torch.ones(2 * WORKERS * STEPS, 1)), batch_size=2
    )
    trainer.fit(Net(), data)
    (folder / f"saves-in-{os.getpid()}").write_text(str(trainer.checkpoint_callback.dirpath))  # type: ignore[union-attr]
