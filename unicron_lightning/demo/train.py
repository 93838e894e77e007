"""The training script of the demo: any Lightning script with ``strategy="unicron"``. Run by torchrun, once per worker.

In addition to training it writes a diary, a JSON line per micro-batch and step, from which the demo proves its claims.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader
from typing_extensions import override

from unicron_lightning.demo.dataset import Windows
from unicron_lightning.demo.model import GPT

LENGTH = 64


class DiaryCallback(Callback):
    """Writes this worker's activities, line by line, to a file of its own."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / f"worker-{os.getpid()}.jsonl").open("a", buffering=1)
        self._write(
            event="start",
            task=os.environ.get("UNICRON_TASK"),
            round=int(os.environ.get("UNICRON_ROUND", "1")),
            node=os.environ.get("UNICRON_NODE"),
        )

    def micro_batch(self, step: int, samples: list[int]) -> None:
        """Record a micro-batch of the step that follows ``step`` finished ones."""
        self._write(event="micro_batch", step=step, samples=samples)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = float(outputs["loss"])
        world, step = trainer.world_size, trainer.global_step
        self._write(event="step", step=step, epoch=trainer.current_epoch, world=world, loss=loss)

    def _write(self, **fields: Any) -> None:
        self._file.write(json.dumps({"at": time.time(), "pid": os.getpid(), **fields}) + "\n")


class DemoGPT(GPT):
    """The model, which records each micro-batch in the diary after its forward."""

    diary: DiaryCallback
    pace: float
    """Seconds of sleep per micro-batch, in place of an accelerator's work."""
    flops_per_step: float

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        time.sleep(self.pace)
        self.diary.micro_batch(self.trainer.global_step, batch[0].tolist())
        return loss


class StopOnRequest(Callback):
    """Ends the training when a file ``stop`` exists, at a step that all workers agree on."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step % 10 == 0 and trainer.strategy.broadcast(self._path.exists()):
            trainer.should_stop = True


def main() -> None:
    """Train, and save the final parameters and validation loss next to the diary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps-per-epoch", type=int, default=130)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds to sleep per micro-batch")
    parser.add_argument("--until-told", action="store_true", help="end when OUT/stop exists, without validation")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pl.seed_everything(7, verbose=False)
    windows = options.steps_per_epoch * options.nodes * options.accumulate * options.batch_size
    train = DataLoader(Windows(0.0, 0.9, LENGTH, windows), batch_size=options.batch_size, shuffle=True)
    validate = DataLoader(Windows(0.9, 1.0, LENGTH, 120), batch_size=8)
    diary = DiaryCallback(options.out)
    model = DemoGPT(length=LENGTH, steps=options.epochs * options.steps_per_epoch)
    model.diary, model.pace = diary, options.pace
    tokens = options.nodes * options.accumulate * options.batch_size * LENGTH
    model.flops_per_step = 6.0 * sum(parameter.numel() for parameter in model.parameters()) * tokens
    trainer = pl.Trainer(
        strategy="unicron",
        accelerator="cpu",
        devices=1,
        num_nodes=options.nodes,
        accumulate_grad_batches=options.accumulate,
        max_epochs=options.epochs,
        max_steps=options.max_steps,
        limit_val_batches=0 if options.until_told else 1.0,
        gradient_clip_val=1.0,
        callbacks=[
            diary,
            ModelCheckpoint(options.out / "checkpoints", save_last=True),
            StopOnRequest(options.out / "stop"),
        ][: 3 if options.until_told else 2],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, train, validate)
    result = {
        "parameters": {name: parameter.detach() for name, parameter in model.named_parameters()},
        "val_loss": float(trainer.callback_metrics.get("val_loss", float("nan"))),
        "steps": trainer.global_step,
        "flops_per_step": model.flops_per_step,
    }
    torch.save(result, options.out / f"final-{os.getpid()}.pt")


if __name__ == "__main__":
    main()
