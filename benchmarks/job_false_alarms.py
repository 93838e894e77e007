"""A training with many healthy irregularities: everything that online statistics could mistake for a fault.

    torchrun ... job_false_alarms.py SECONDS

A small GPT computes for real, with a validation every 40 steps, a checkpoint every 60 that takes up to 3 s to write, a
loader with samples that take seconds, occasional garbage collections that hold the interpreter, and a slow hook. All
irregularities are drawn from seeds, and the slow ones are logged.
"""

from __future__ import annotations

import workload

log = workload.EventLog()
log("started")

import gc  # noqa: E402
import random  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import lightning.pytorch as pl  # noqa: E402
import torch  # noqa: E402
from lightning.fabric.plugins import TorchCheckpointIO  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from models import GPT  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from transformer import SIZES, Walks  # noqa: E402

SIZE = SIZES["tiny"]
STALL_EVERY, STALL_SECONDS = 9_000, (0.5, 6.0)
"""One sample in `STALL_EVERY` takes this long."""
COLLECT_EVERY, COLLECT_OBJECTS = 80, (100_000, 1_000_000)
"""One step in `COLLECT_EVERY` collects this many objects."""
LIFE = random.Random(f"life {workload.SLOT}")
"""Generator of this rank alone; the `random` module's own generator is the same on all ranks."""
CHECKPOINT_SECONDS = (0.2, 3.0)
HOOK_EVERY, HOOK_SECONDS = 500, (0.5, 4.0)


class Stalling(Walks):
    """Dataset with some slow samples, always the same ones, as if read from remote storage."""

    def __getitem__(self, index: int) -> Tensor:
        if random.Random(index).randrange(STALL_EVERY) == 0:
            seconds = random.Random(~index).uniform(*STALL_SECONDS)
            log("stall", seconds=seconds)
            time.sleep(seconds)
        return super().__getitem__(index)


class SlowWriting(TorchCheckpointIO):
    """Checkpoint writer with the delay of a remote storage."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        seconds = LIFE.uniform(*CHECKPOINT_SECONDS)
        log("checkpoint", seconds=seconds)
        time.sleep(seconds)
        super().save_checkpoint(checkpoint, path, storage_options)


class Validated(GPT):
    def validation_step(self, batch: Tensor, index: int) -> None:
        logits = self(batch[:, :-1])
        self.log("val", nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()))


class Life(pl.Callback):
    """Irregular work of callbacks between steps, at different times on each rank."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def on_train_batch_start(self, *_: object) -> None:
        if LIFE.randrange(COLLECT_EVERY) == 0:
            started = time.monotonic()
            garbage = [cycle() for _ in range(LIFE.randint(*COLLECT_OBJECTS) // 2)]
            del garbage
            gc.collect()
            log("collected", seconds=time.monotonic() - started)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        log("step", step=trainer.global_step - 1, world=trainer.world_size)
        if LIFE.randrange(HOOK_EVERY) == 0:
            seconds = LIFE.uniform(*HOOK_SECONDS)
            log("hook", seconds=seconds)
            time.sleep(seconds)
        if trainer.global_step % 20 == 0:
            over = trainer.strategy.broadcast(time.monotonic() > self._end, 0)
            trainer.should_stop = trainer.should_stop or over

    def on_validation_end(self, trainer: pl.Trainer, *_: object) -> None:
        log("validated", step=trainer.global_step)


def cycle() -> list[Any]:
    """Return an object that only the garbage collector frees."""
    item: list[Any] = []
    item.append(item)
    return item


def main() -> None:
    torch.set_num_threads(1)
    trainer = pl.Trainer(
        strategy="unicron",
        accelerator="cpu",
        devices=1,
        num_nodes=workload.WORKERS,
        accumulate_grad_batches=2,
        max_epochs=-1,
        callbacks=[Life(float(sys.argv[1])), ModelCheckpoint("checkpoints", every_n_train_steps=60, save_last=True)],
        plugins=[SlowWriting()],
        val_check_interval=80,  # 80 batches per device: every 40 steps
        limit_val_batches=5,
        num_sanity_val_steps=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=Path.cwd(),
    )
    training = DataLoader(Stalling(65_536, SIZE.context), batch_size=SIZE.sequences, shuffle=True)
    validation = DataLoader(Walks(512, SIZE.context), batch_size=SIZE.sequences)
    trainer.fit(Validated(SIZE), training, validation)


if __name__ == "__main__":
    main()
