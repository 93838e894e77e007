"""A training on one kind of data that counts how often each sample is used, under torchrun agents.

``data_worker.py FOLDER`` with ``$DATA_KIND``: one of `KINDS`, or of `libraries.MAKERS`; and ``$DATA_STRATEGY``: one of
`WORKERS`. With ``$DATA_DEATHS`` the workers of `DEATHS` kill themselves.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parent.parent))

from programs import libraries
from programs.stream_worker import BATCH, DEVICES, EPOCHS, ROUNDS, SAMPLES, Counting, Numbers

WORKERS = {"unicron": DEVICES, "unicron_fsdp": 4}
"""Workers by strategy; a replica of a sharded model has `SHARDS`."""
SHARDS = 2
SECOND = 60
"""Samples of the second loader; their numbers follow those of the first."""
SIZE = SAMPLES + SECOND
SCHEDULE = {0: ROUNDS, 1: 1}
"""Rounds of a step in each epoch, of the kinds "scheduled" and "stream_scheduled"."""

DEATHS = {("end", 0): 0, ("start", 1): 1}
"""Ranks that die in the hooks at the end of the first epoch and at the start of the second."""


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


def second(size: int = 6) -> BatchesOf:
    return BatchesOf((SAMPLES + torch.arange(SECOND)).split(size))


def stream(**options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(SAMPLES), batch_size=BATCH, **options)


def shuffled() -> DataLoader[Any]:
    """The samples of `second`, in another order in each epoch."""
    return DataLoader(TensorDataset(SAMPLES + torch.arange(SECOND)), batch_size=BATCH, shuffle=True, num_workers=1)


KINDS: dict[str, Callable[[Path], Any]] = {
    "several": lambda folder: {"first": numbers(), "second": second()},
    "max_size": lambda folder: CombinedLoader([numbers(), second()], "max_size"),
    "min_size": lambda folder: CombinedLoader([numbers(), second(1)], "min_size"),
    "scheduled": lambda folder: numbers(),
    "sequence": lambda folder: BatchesOf(torch.arange(SAMPLES).split(BATCH)),
    "reopened": lambda folder: Reopenable(),
    "stream": lambda folder: stream(),
    "stream_scheduled": lambda folder: stream(),
    "with_stream": lambda folder: {"first": stream(), "second": second()},
    "stream_max_size": lambda folder: CombinedLoader([stream(), shuffled()], "max_size"),
    "stream_min_size": lambda folder: CombinedLoader([stream(num_workers=1), second(1)], "min_size"),
}


def data(kind: str, folder: Path) -> Any:
    """Return the training data of a kind, made in a folder."""
    if kind in KINDS:
        return KINDS[kind](folder)
    dataset = libraries.MAKERS[kind][1](folder, SAMPLES)
    return dataset if isinstance(dataset, DataLoader) else DataLoader(dataset, batch_size=BATCH)


def expected(kind: str, devices: int = DEVICES) -> list[float]:
    """Return how often each sample is to be used."""
    counts = [float(EPOCHS)] * SAMPLES
    match kind:
        case "several":  # the first loader has 74 batches, in whole rounds and one of two; the second has ten
            rest = [7 + (number < 74 % 10) for number in range(10)]
            return counts + [float(EPOCHS * rest[sample // 6]) for sample in range(SECOND)]
        case "max_size" | "stream_max_size":
            return counts + [float(EPOCHS)] * SECOND
        case "min_size" | "stream_min_size":  # a device's samples of the stream are those of the map-style data
            return _shortest() + [float(EPOCHS)] * SECOND
        case "with_stream":  # each device has batches of its own, which begin again
            own = [range(device, 10, devices) for device in range(devices)]
            rounds = [-(-len(range(device, SAMPLES, devices)) // BATCH) for device in range(devices)]
            times = {n: len(range(i, rounds[d], len(own[d]))) for d in range(devices) for i, n in enumerate(own[d])}
            return counts + [float(EPOCHS * times[sample // 6]) for sample in range(SECOND)]
    return counts


def _shortest() -> list[float]:
    """Return how often each of the first samples is used if an epoch ends after `SECOND` micro-batches."""
    counts = torch.zeros(SAMPLES)
    for epoch in range(EPOCHS):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
        counts[order[: SECOND * BATCH]] += 1
    return counts.tolist()


class Kinds(Counting):
    """Counts samples in batches of all kinds; trainable alone, for which it is not slowed down.

    Args:
        folder: of notes.
        paced: whether steps take the time that a replacement needs.
    """

    def __init__(self, folder: Path, *, paced: bool = True) -> None:
        super().__init__(folder, SIZE, paced=paced)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(torch.cat(list(found(batch))), batch_idx)

    def on_train_epoch_start(self) -> None:
        self._die("start")

    def on_train_epoch_end(self) -> None:
        self._die("end")

    def _die(self, hook: str) -> None:
        mark = self.folder / f"died-at-{hook}"
        if not os.environ.get("DATA_DEATHS") or mark.exists():
            return
        if DEATHS.get((hook, self.current_epoch)) == self.global_rank:
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def found(batch: Any) -> Iterator[Tensor]:
    """Yield the numbers of samples in a batch of any kind."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, dict) and "number" in batch:  # WebDataset adds the sample's key
        yield batch["number"]
    elif batch is not None:
        for part in batch.values() if isinstance(batch, dict) else batch:
            yield from found(part)


def trainer_of(folder: Path, kind: str = "", strategy: str = "unicron", **settings: Any) -> pl.Trainer:
    from unicron_lightning import UnicronFSDPStrategy

    follows = kind.endswith("scheduled")
    saving = ModelCheckpoint(folder / "saved", "{step}", every_n_train_steps=5, save_top_k=-1)
    return pl.Trainer(
        strategy=UnicronFSDPStrategy(shard_size=SHARDS) if strategy == "unicron_fsdp" else strategy,
        accelerator="cpu",
        devices=1,
        num_nodes=WORKERS[strategy],
        accumulate_grad_batches=1 if follows else ROUNDS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saving, GradientAccumulationScheduler(SCHEDULE)] if follows else [saving],
        **{"max_epochs": EPOCHS} | settings,
    )


def main() -> None:
    folder, kind = Path(sys.argv[1]), os.environ["DATA_KIND"]
    made = folder / "data"
    made.mkdir(exist_ok=True)
    module, trainer = Kinds(folder), trainer_of(folder, kind, os.environ["DATA_STRATEGY"])
    trainer.fit(module, data(kind, made))
    shard = getattr(trainer.strategy, "fabric", None)
    module.note("result", counts=module.counted(), shard=0 if shard is None else shard.own_shard)


if __name__ == "__main__":
    main()
