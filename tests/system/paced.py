"""A training whose step takes a chosen time: ``paced.py FOLDER MICRO_BATCH_SECONDS STEP_SECONDS``.

It ends when FOLDER/stop exists.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset


class Model(pl.LightningModule):
    def __init__(self, folder: Path, end_step: Callable[[int], object], micro_batch_seconds: float) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
        self._folder, self._end_step, self._micro_batch_seconds = folder, end_step, micro_batch_seconds

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        time.sleep(self._micro_batch_seconds)
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_train_batch_end(self, *_: object) -> None:
        self._end_step(self.global_step)
        self.trainer.should_stop = (self._folder / "stop").exists()


def train(folder: Path, end_step: Callable[[int], object], micro_batch_seconds: float = 0.0, **options: Any) -> None:
    """Train until FOLDER/stop exists; call a function with the number of each finished step."""
    pl.seed_everything(1, verbose=False)
    trainer = pl.Trainer(
        strategy="unicron", accelerator="cpu", devices=1, max_steps=10**6, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    model = Model(folder, end_step, micro_batch_seconds)
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(24000, 8)), batch_size=4))


if __name__ == "__main__":
    micro_batch, step = map(float, sys.argv[2:4])
    train(Path(sys.argv[1]), lambda _: time.sleep(step), micro_batch, accumulate_grad_batches=3)
