"""Predicts, with or without a fit before; one worker dies in its second batch.

Its argument is a folder: ``fits`` there asks for the fit, ``waits`` for the end of the dead worker's successor, after
which ``die`` kills the others. ``streams`` has the numbers of the loaders that are streams, ``reading`` asks for a
death in the data set. Each worker writes what it got to ``predicted-PID.json``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

SAMPLES = (50, 31)
BATCH = 4


class Uneven(IterableDataset[Any]):
    """The numbers below ``size``, of which later devices have more.

    Args:
        size: of all streams.
        folder: where ``killed`` tells that the last device's reader has died in its second batch; None: none dies.
    """

    def __init__(self, size: int, folder: Path | None) -> None:
        self._size = size
        self._folder = folder

    def __iter__(self) -> Iterator[Any]:
        rank, world = dist.get_rank(), dist.get_world_size()
        deal = [device for device in range(world) for _ in range(device + 1)]
        own = [number for number in range(self._size) if deal[number % len(deal)] == rank]
        for place, number in enumerate(own):
            if place == BATCH + 1 and rank == world - 1 and self._folder is not None:
                die_once(self._folder)
            yield (torch.tensor([float(number)]),)


def die_once(folder: Path) -> None:
    """Kill this worker, unless one has been killed."""
    if not (folder / "killed").exists():
        (folder / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)


class Line(pl.LightningModule):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.folder = folder
        self.first = not (folder / "killed").exists()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(0.02)
        return self.layer(batch[0]).square().mean()

    def on_train_batch_end(self, *about: Any) -> None:
        self.trainer.should_stop = self.trainer.world_size == self.trainer.num_nodes

    def predict_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int) -> Tensor:
        time.sleep(0.05)
        self.die(batch_idx, dataloader_idx)
        if (self.folder / "waits").exists() and (self.folder / "killed").exists():
            self._wait_for_successor()
        return batch[0].flatten()

    def die(self, batch_idx: int, dataloader_idx: int) -> None:
        """Kill the last rank in its second batch of the loader."""
        dies = batch_idx == 1 and dataloader_idx == int((self.folder / "loader").read_text())
        dies = dies and not (self.folder / "reading").exists()
        if dies and self.global_rank == self.trainer.world_size - 1:
            die_once(self.folder)

    def _wait_for_successor(self) -> None:
        """Predict on only once the dead worker's successor has ended."""
        deadline = time.monotonic() + 100
        while not list(self.folder.glob("predicted-*.json")):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        if self.first and (self.folder / "die").exists():
            os.kill(os.getpid(), signal.SIGKILL)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Writer(BasePredictionWriter):
    """Keeps the indices of each batch."""

    def __init__(self, streams: list[int]) -> None:
        super().__init__("batch_and_epoch")
        self.streams = streams
        self.batches: list[Any] = []
        self.epoch: Any = None

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Tensor, indices: Any, *about: Any) -> None:
        assert indices == ([] if about[-1] in self.streams else prediction.tolist())
        self.batches.append([about[-1], *prediction.tolist()])

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.epoch = [[batch.tolist() for batch in part] for part in predictions], indices


def main(make: type[Line] = Line, strategy: Any = "unicron", nodes: int = 3) -> None:
    folder = Path(sys.argv[1])
    pl.seed_everything(1, verbose=False)
    given = folder / "streams"
    streams = [int(place) for place in given.read_text().split()] if given.exists() else []
    writer = Writer(streams)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        num_nodes=nodes,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[writer],
    )
    module = make(folder)
    if (folder / "fits").exists():
        trainer.fit(module, DataLoader(TensorDataset(torch.randn(48, 1)), batch_size=4))
    ordinary = [TensorDataset(torch.arange(float(size)).unsqueeze(1)) for size in SAMPLES]
    dying = int((folder / "loader").read_text()) if (folder / "reading").exists() else None
    data = [
        Uneven(len(each), folder if place == dying else None) if place in streams else each
        for place, each in enumerate(ordinary)
    ]
    loaders = [DataLoader(each, batch_size=BATCH) for each in data]
    returned: Any = trainer.predict(module, loaders)
    result = {
        "returned": [[batch.tolist() for batch in part] for part in returned],
        "batches": writer.batches,
        "epoch": writer.epoch,
        "world": trainer.world_size,
    }
    (folder / f"predicted-{os.getpid()}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
