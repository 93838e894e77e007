"""A training whose step takes a chosen time: ``paced.py FOLDER MICRO_BATCH_SECONDS STEP_SECONDS``.

It ends when FOLDER/stop exists.
"""

import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

FOLDER = Path(sys.argv[1])
MICRO_BATCH_SECONDS, STEP_SECONDS = map(float, sys.argv[2:4])


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        time.sleep(MICRO_BATCH_SECONDS)
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_train_batch_end(self, *_: object) -> None:
        time.sleep(STEP_SECONDS)
        self.trainer.should_stop = (FOLDER / "stop").exists()


if __name__ == "__main__":
    pl.seed_everything(1, verbose=False)
    trainer = pl.Trainer(
        strategy="unicron", accelerator="cpu", devices=1, accumulate_grad_batches=3, max_steps=10**6, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Model(), DataLoader(TensorDataset(torch.randn(24000, 8)), batch_size=4))
