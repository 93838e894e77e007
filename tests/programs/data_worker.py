"""A training on one kind of data that counts how often each sample is used, under torchrun agents.

``data_worker.py FOLDER`` with ``$DATA_KIND``: one of `KINDS`, or of `libraries.MAKERS`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parent.parent))

from programs import libraries
from programs.stream_worker import BATCH, DEVICES, EPOCHS, ROUNDS, SAMPLES, Counting, Numbers

SECOND = 30
"""Samples of the second loader, in batches of 3; their numbers follow those of the first."""


class Reopenable:
    """A loader of its own kind, with a new iterator each time, divided among ranks."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        numbers = Numbers(SAMPLES)
        numbers.set_epoch(self.epoch)
        return iter(DataLoader(numbers, batch_size=BATCH))


def numbers() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(SAMPLES)), batch_size=BATCH)


class BatchesOf(list[Tensor]):
    """A list that Lightning takes as one loader; it takes a plain list of tensors as several."""


def second() -> BatchesOf:
    return BatchesOf((SAMPLES + torch.arange(SECOND)).split(3))


KINDS: dict[str, Callable[[Path], Any]] = {
    "several": lambda folder: {"first": numbers(), "second": second()},
    "sequence": lambda folder: BatchesOf(torch.arange(SAMPLES).split(BATCH)),
    "reopened": lambda folder: Reopenable(),
    "stream": lambda folder: DataLoader(Numbers(SAMPLES), batch_size=BATCH),
}


def data(kind: str, folder: Path) -> Any:
    """Return the training data of a kind, made in a folder."""
    if kind in KINDS:
        return KINDS[kind](folder)
    dataset = libraries.MAKERS[kind][1](folder, SAMPLES)
    return dataset if isinstance(dataset, DataLoader) else DataLoader(dataset, batch_size=BATCH)


def expected(kind: str) -> list[float]:
    """Return how often each sample is to be used."""
    counts = [float(EPOCHS)] * SAMPLES
    if kind == "several":  # 24 rounds of three batches, and one of two; the second loader has ten batches
        rest = [7 + (number < 74 % 10) for number in range(10)]
        counts += [float(EPOCHS * rest[sample // 3]) for sample in range(SECOND)]
    return counts


class Kinds(Counting):
    """Counts samples in batches of all kinds; trainable alone, for which it is not slowed down.

    Args:
        folder: of notes.
        paced: whether steps take the time that a replacement needs.
    """

    def __init__(self, folder: Path, *, paced: bool = True) -> None:
        super().__init__(folder, SAMPLES + SECOND, paced=paced)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(torch.cat(list(found(batch))), batch_idx)


def found(batch: Any) -> Iterator[Tensor]:
    """Yield the numbers of samples in a batch of any kind."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, dict) and "number" in batch:  # WebDataset adds the sample's key
        yield batch["number"]
    elif batch is not None:
        for part in batch.values() if isinstance(batch, dict) else batch:
            yield from found(part)


def trainer_of(folder: Path, **settings: Any) -> pl.Trainer:
    return pl.Trainer(
        strategy="unicron",
        accelerator="cpu",
        devices=1,
        num_nodes=DEVICES,
        accumulate_grad_batches=ROUNDS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder / "saved", "{step}", every_n_train_steps=5, save_top_k=-1)],
        **{"max_epochs": EPOCHS} | settings,
    )


def main() -> None:
    folder, kind = Path(sys.argv[1]), os.environ["DATA_KIND"]
    made = folder / "data"
    made.mkdir(exist_ok=True)
    module = Kinds(folder)
    trainer_of(folder).fit(module, data(kind, made))
    module.note("result", counts=module.counted()[: len(expected(kind))])


if __name__ == "__main__":
    main()
