"""A training and validations on iterable data sets that count how often each sample is used.

Under torchrun agents: ``stream_worker.py FOLDER``, with ``$STREAM_WORKERS`` worker processes for the data. With
``$STREAM_STATES`` the loader is a StatefulDataLoader, whose state is kept every four steps. With ``$STREAM_ALONE``
there is no training: a validation, a test and a prediction, each over streams and over a map-style data set. With
``$STREAM_AT_ONCE`` validations and tests read two loaders at once, of which tests without a training read no stream.
``$STREAM_DEATHS``, e.g. ``validate-1 test-0``, names stages and ranks: a rank kills itself in its third batch.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import SumMetric

from unicron_lightning.data import streams

DEVICES, ROUNDS, BATCH, EPOCHS = 3, 2, 4, 2
SAMPLES = 290
"""Streams of 97, 97 and 96 samples: 25, 25 and 24 batches, 13 steps."""
EVALUATED = 85
"""Streams of 29, 28 and 28 samples: 8, 7 and 7 batches without worker processes, 8 each with two."""
INDEXED = 50
"""Samples of the map-style data set; their numbers follow those of the streams."""
PACE_SECONDS = 0.05
EVALUATION_SECONDS = 0.05
INCOMPLETE_SECONDS = 30.0
"""Most additional time of a step in a smaller world, so that a replacement can join before the end; a newer epoch ends
it.
"""


class Numbers(IterableDataset[torch.Tensor]):
    """Every sample's number, in an order that depends on the epoch; divided among ranks and worker processes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        worker = get_worker_info()
        part, parts = (rank, world) if worker is None else (rank + world * worker.id, world * worker.num_workers)
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch))
        yield from order[part::parts]


class Shuffled(Numbers):
    """`Numbers` in an order that random numbers of the process decide."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        own = torch.stack(list(super().__iter__()))
        yield from own[torch.randperm(len(own))]


class Resumable(Numbers):
    """`Numbers` that continue from a state."""

    def __init__(self, size: int, folder: Path) -> None:
        super().__init__(size)
        self.folder = folder
        self.read = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in itertools.islice(super().__iter__(), self.read, None):
            self.read += 1
            yield number
        self.read = 0

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.read = state["read"]
        with (self.folder / "events.jsonl").open("a") as file:
            file.write(json.dumps({"what": "loaded", **state}) + "\n")


def numbers_of(batch: Any) -> torch.Tensor:
    """Return the numbers of the samples in a batch of one loader, or of several."""
    if batch is None:
        return torch.empty(0, dtype=torch.int64)
    return batch if isinstance(batch, torch.Tensor) else torch.cat([numbers_of(part) for part in batch])


class Evaluates(pl.LightningModule):
    """Logs sums over all batches of an evaluation, and returns predicted samples."""

    folder: Path
    deaths: Sequence[str] = ()

    def __init__(self) -> None:
        super().__init__()
        self.total = SumMetric()
        self.evaluations: Counter[str] = Counter()

    def validation_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        numbers = self.evaluated(batch, dataloader_idx)
        self.log("count", float(len(numbers)), reduce_fx="sum", batch_size=len(numbers))
        self.log("squares", numbers.square().sum().float(), reduce_fx="sum", batch_size=len(numbers))
        self.total.update(numbers)
        if dataloader_idx == 0:
            self.log("total", self.total, on_step=False, on_epoch=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        return self.evaluated(batch, dataloader_idx)

    def evaluated(self, batch: Any, loader: int) -> torch.Tensor:
        """Return the numbers of the samples in a batch, after noting them."""
        numbers = numbers_of(batch)
        if not self.trainer.sanity_checking:
            stage = self.trainer.state.stage
            assert stage is not None
            self.note("evaluated", stage=stage.value, epoch=self.current_epoch, loader=loader, numbers=numbers.tolist())
            self.die(stage.value)
            time.sleep(EVALUATION_SECONDS)
        return numbers

    def die(self, stage: str) -> None:
        """Kill this process in its third batch of a stage, if it is to die there; its successor does not."""
        self.evaluations[stage] += 1
        place = f"{stage}-{self.global_rank}"
        if self.evaluations[stage] == 3 and place in self.deaths:
            (self.folder / f"died-{place}").touch()
            self.note("dies", stage=stage)
            os.kill(os.getpid(), signal.SIGKILL)

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            names = [name for name in self.trainer.callback_metrics if name.startswith(("count", "squares", "total"))]
            values = {name: float(self.trainer.callback_metrics[name]) for name in names}
            self.note("validated", epoch=self.current_epoch, values=values)

    def note(self, what: str, **fields: Any) -> None:
        place = {"pid": os.getpid(), "rank": self.global_rank, "world": self.trainer.world_size}
        with (self.folder / "events.jsonl").open("a") as file:
            file.write(json.dumps({"what": what, **place, **fields}) + "\n")


class Counting(Evaluates):
    """``counts.weight[i]`` is minus the number of times that sample i was used."""

    def __init__(self, folder: Path, size: int = SAMPLES, *, paced: bool = True) -> None:
        super().__init__()
        self.counts = nn.Embedding(size, 1, _weight=torch.zeros(size, 1))
        self.folder = folder
        self.paced = paced
        self.divisor = math.nan
        if not list(folder.glob("died-*")):
            self.deaths = os.environ.get("STREAM_DEATHS", "").split()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        self.divisor = strategy.shape.of(self.current_epoch).divisor(batch.in_full_step)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.paced:
            time.sleep(PACE_SECONDS)
        return self.counts(batch).sum() * self.divisor

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note("step", step=self.global_step, last=self.trainer.is_last_batch)
        engine: Any = self.trainer.strategy.engine  # type: ignore[attr-defined]
        deadline = time.monotonic() + INCOMPLETE_SECONDS
        while self.paced and self.trainer.world_size < self.trainer.num_nodes and time.monotonic() < deadline:
            if engine.control.newer_than(engine.world.epoch):
                return
            time.sleep(0.02)

    def counted(self) -> list[float]:
        """Return how often each sample was used, of a sharded model those of this worker's shard."""
        weight: Any = self.counts.weight
        own = weight.to_local() if isinstance(weight, DTensor) else weight
        return [round(-value, 4) for value in own.flatten().tolist()]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def main() -> None:
    folder = Path(sys.argv[1])
    module = Counting(folder)
    workers = int(os.environ["STREAM_WORKERS"])
    loader: DataLoader[torch.Tensor] = DataLoader(Numbers(SAMPLES), batch_size=BATCH, num_workers=workers)
    if os.environ.get("STREAM_STATES"):
        streams.STATE_STEPS = 4
        loader = StatefulDataLoader(Resumable(SAMPLES, folder), batch_size=BATCH, num_workers=workers)
    trainer = pl.Trainer(
        strategy="unicron",
        accelerator="cpu",
        devices=1,
        num_nodes=DEVICES,
        accumulate_grad_batches=ROUNDS,
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    streams_of = DataLoader[torch.Tensor] if not os.environ.get("STREAM_STATES") else StatefulDataLoader
    evaluated = streams_of(Numbers(EVALUATED), batch_size=BATCH, num_workers=workers)
    if os.environ.get("STREAM_ALONE"):
        evaluate(trainer, module, DataLoader(Shuffled(EVALUATED), batch_size=BATCH, num_workers=workers))
        return
    at_once = bool(os.environ.get("STREAM_AT_ONCE"))
    trainer.fit(module, loader, CombinedLoader([evaluated, indexed()], "max_size") if at_once else evaluated)
    module.note("result", counts=module.counted())


def indexed(*, shuffle: bool = False) -> DataLoader[Any]:
    """The samples after those of the streams."""
    return DataLoader(TensorDataset(EVALUATED + torch.arange(INDEXED)), batch_size=BATCH, shuffle=shuffle)


def evaluate(trainer: pl.Trainer, module: Counting, streams: DataLoader[torch.Tensor]) -> None:
    """Run each kind of evaluation, without a training before it, in processes with different seeds."""
    pl.seed_everything(os.getpid(), verbose=False)
    for stage in ("validate", "test", "predict"):
        loaders: Any = [streams, indexed(shuffle=stage == "predict")]
        if os.environ.get("STREAM_AT_ONCE") and stage != "predict":
            first = streams if stage == "validate" else DataLoader(range(EVALUATED), batch_size=BATCH)
            loaders = CombinedLoader([first, loaders[1]], "max_size")
        results: Any = getattr(trainer, stage)(module, loaders)
        if stage == "predict":
            results = [[batch.tolist() for batch in part] for part in results]
        module.note("result", stage=stage, values=results)


if __name__ == "__main__":
    main()
