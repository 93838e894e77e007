"""Validations of a sharded model in a process without torchrun; prints what they have seen, by scenario."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

SAMPLES = 8


class Numbers(IterableDataset[torch.Tensor]):
    """Numbers, with a length."""

    def __init__(self) -> None:
        self.read = 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(SAMPLES):
            self.read += 1
            yield torch.tensor([float(number)])


class Unknown(IterableDataset[torch.Tensor]):
    """Numbers, without a length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(Numbers())


class Recording(pl.LightningModule):
    """Records what it validates on, and a random number of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.numbers: list[int] = []
        self.drawn: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.numbers.append(int(batch))
        self.drawn.append(float(torch.rand(())))
        self.net(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer_of(folder: str, **settings: Any) -> pl.Trainer:
    pl.seed_everything(3, verbose=False)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "default_root_dir": folder}
    return pl.Trainer(strategy="unicron_fsdp", accelerator="cpu", devices=1, **quiet, **settings)


def drawn(folder: str, workers: int) -> list[float]:
    """Return the random numbers of a validation with samples of worker processes, or of this process."""
    module = Recording()
    numbers: Any = [torch.tensor([float(number)]) for number in range(4)]
    trainer_of(folder).validate(module, DataLoader(numbers, num_workers=workers), verbose=False)
    return module.drawn


def scheduled(folder: str) -> list[int]:
    """Return the numbers of two validations of a fit whose steps change."""
    module, scheduler = Recording(), GradientAccumulationScheduler({0: 1, 1: 4})
    trainer = trainer_of(folder, max_epochs=2, num_sanity_val_steps=0, callbacks=[scheduler])
    trainer.fit(module, DataLoader(Numbers()), DataLoader(Numbers()))
    return module.numbers


def limited(folder: str) -> tuple[list[int], int]:
    """Return the numbers of half a validation, and how many were read."""
    module, data = Recording(), Numbers()
    trainer_of(folder, limit_val_batches=0.5).validate(module, DataLoader(data), verbose=False)
    return module.numbers, data.read


def listed(folder: str) -> list[int]:
    """Return the numbers of a validation over data with an index, and then a stream without a length."""
    module = Recording()
    indexed: Any = [torch.tensor([float(number)]) for number in range(2)]
    trainer_of(folder).validate(module, [DataLoader(indexed), DataLoader(Unknown())], verbose=False)
    return module.numbers


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as made:
        random = [drawn(made, workers) for workers in (0, 1)]
        found = {"random": random, "scheduled": scheduled(made), "limited": limited(made), "listed": listed(made)}
        print(json.dumps(found))
