"""An iterable data set for tests/fsdp/train.py, and its batches in the order of a distributed run."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from unicron_lightning.data import streams

STATE_STEPS = 3


class Streamed(IterableDataset[Any]):
    """The samples of a data set, divided among devices and worker processes.

    Args:
        samples: the data set.
        place: rank and size of the world; None: those of torch's default group.
        folder: of notes about opened streams; None: none are written.
    """

    def __init__(self, samples: Dataset[Any], place: tuple[int, int] | None, folder: Path | None) -> None:
        self._samples: Any = samples
        self._place = place
        self.folder = folder

    def __iter__(self) -> Iterator[Any]:
        rank, world = self._place or (dist.get_rank(), dist.get_world_size())
        if self.folder is not None:
            with (self.folder / f"opened-{os.getpid()}").open("a") as file:
                file.write(f"{rank}\n")
        worker = get_worker_info()
        part, parts = (rank, world) if worker is None else (rank + world * worker.id, world * worker.num_workers)
        for number in range(part, len(self._samples), parts):
            yield self._samples[number]


class Resumable(Streamed):
    """`Streamed` that continues from a state."""

    read = 0

    def __iter__(self) -> Iterator[Any]:
        for sample in itertools.islice(super().__iter__(), self.read, None):
            self.read += 1
            yield sample
        self.read = 0

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.read = state["read"]
        assert self.folder is not None
        with (self.folder / f"continued-{os.getpid()}").open("a") as file:
            file.write(f"{self.read}\n")


def stream(samples: Dataset[Any], batch: int, options: dict[str, Any], folder: Path) -> DataLoader[Any]:
    """Return a loader of streams.

    Args:
        samples: of all streams.
        batch: size of a batch.
        options: of the loader; "stateful": it is torchdata's, whose states are kept every `STATE_STEPS` steps.
        folder: of notes.
    """
    streams.STATE_STEPS = STATE_STEPS
    given = {name: value for name, value in options.items() if name != "stateful"}
    if options.get("stateful"):
        loader: DataLoader[Any] = StatefulDataLoader(Resumable(samples, None, folder), batch_size=batch, **given)
        return loader
    return DataLoader(Streamed(samples, None, folder), batch_size=batch, **given)


def in_order(samples: Dataset[Any], batch: int, options: dict[str, Any], devices: int) -> list[Any]:
    """Return the batches of all streams, round after round."""
    given = {name: value for name, value in options.items() if name != "stateful"}
    parts = [Streamed(samples, (rank, devices), None) for rank in range(devices)]
    rounds = itertools.zip_longest(*(DataLoader(part, batch_size=batch, **given) for part in parts))
    return [each for batches in rounds for each in batches if each is not None]
