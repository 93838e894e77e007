"""Trains with one stream of 8 samples for the first device and one of 40 for the second, and prints what is read."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

LENGTHS = (8, 40)
BATCH = 2
WORKER = os.environ.get("RANK", "")
"""This process; the variable is that of a stream while it is read."""


class Samples(IterableDataset[Tensor]):
    """The samples of a device."""

    def __iter__(self) -> Iterator[Tensor]:
        stream, read = dist.get_rank(), 0
        try:
            for read in range(1, LENGTHS[stream] + 1):
                yield torch.full((32,), float(read))
        finally:
            with Path(sys.argv[1]).open("a") as file:
                file.write(f"{WORKER} {stream} {read}\n")


class Model(BoringModel):
    """Takes tensors."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).square().mean()


if __name__ == "__main__":
    trainer = Trainer(
        strategy="unicron",
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        limit_val_batches=0,
        enable_progress_bar=False,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Model(), DataLoader(Samples(), batch_size=BATCH))
    assert trainer.global_step == LENGTHS[1] // BATCH
