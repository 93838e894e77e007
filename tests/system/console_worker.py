"""A training with a progress bar: ``console_worker.py FOLDER BAR``, until the file ``end`` exists in the folder."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BARS = {"tqdm": TQDMProgressBar, "rich": RichProgressBar}
BATCHES = 40


class Line(pl.LightningModule):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch: Any) -> Any:
        time.sleep(0.02)
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: Any) -> None:
        time.sleep(0.01)

    def on_train_epoch_end(self) -> None:
        over = (self.folder / "end").exists()
        self.trainer.should_stop = bool(self.trainer.strategy.broadcast(over, 0))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Watch(pl.Callback):
    """Writes what this worker's bar shows, after each step."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        bar: Any = trainer.progress_bar_callback
        if isinstance(bar, TQDMProgressBar):
            shown, count = not bar.train_progress_bar.disable, bar.train_progress_bar.n
        else:
            task = None if bar.progress is None else bar.progress.tasks[bar.train_progress_bar_id or 0]
            shown, count = task is not None and not bar.progress.disable, 0 if task is None else int(task.completed)
        about = {"rank": trainer.global_rank, "world": trainer.world_size, "shown": shown, "count": count}
        about |= {"batch": args[-1] + 1, "at": time.time(), "pid": os.getpid()}
        with Path(sys.argv[1], f"bar-{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(about) + "\n")


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    pl.seed_everything(1)
    trainer = pl.Trainer(
        strategy="unicron",
        accelerator="cpu",
        max_epochs=-1,
        callbacks=[BARS[sys.argv[2]](), Watch()],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    data = DataLoader(TensorDataset(torch.randn(BATCHES * 3, 2)), batch_size=1)
    trainer.fit(Line(folder), data, DataLoader(TensorDataset(torch.randn(6, 2)), batch_size=1))


if __name__ == "__main__":
    main()
