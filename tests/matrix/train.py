"""Trains cases of the matrix and records what is compared: under torchrun, ``train.py FOLDER``.

``settings.json`` in the folder has the strategy, the cases by name, and when a worker is killed, if one is.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from matrix.features import CLIPPING, LENGTH, OPTIONS, WHEN, Case
from matrix.killing import Kill, Killing
from matrix.model import Data, Net
from matrix.records import Hooks, Memory, checkpoints, table

DEVICES = 2


class Peeking(pl.Callback):
    """Looks at a batch of the loaders by itself, on rank 0 only."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        loaders = trainer.val_dataloaders
        if trainer.is_global_zero and loaders is not None:
            next(iter(loaders[0] if isinstance(loaders, list) else loaders))
            next(iter(trainer.train_dataloader))  # type: ignore[call-overload]


class Saving(pl.Callback):
    """Writes the checkpoint to resume from, at the end of the first epoch."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self._path)


def callbacks(case: Case, folder: Path) -> list[pl.Callback]:
    """The callbacks of the axis ``callback``."""
    patience = 9 if case["run"] == "resumed" else 1  # ddp would begin the data of a broken epoch again
    monitor = "val_loss/dataloader_idx_0" if case["evaluation"] == "two_loaders" else "val_loss"
    made: dict[str, list[pl.Callback]] = {
        "early_stopping": [
            EarlyStopping(monitor, min_delta=0.1, patience=patience, check_on_train_epoch_end=False),
            LearningRateMonitor("step"),
        ],
        "top_k": [ModelCheckpoint(folder, "{epoch}-{step}", monitor=monitor, save_top_k=2, save_last=True)],
        "every_steps": [ModelCheckpoint(folder, "{epoch}-{step}", every_n_train_steps=3, save_top_k=-1)],
        "averaging": [StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=1)],
        "peeking": [Peeking()],
        "scheduler": [GradientAccumulationScheduler({0: 2, 1: 1, 2: 3})],
        # Too few steps for a suggestion: under ddp it would be that of rank 0's losses.
        "rate_finder": [LearningRateFinder(max_lr=0.1, num_training_steps=8, early_stop_threshold=None)],
    }
    return made.get(case["callback"], [])


def trainer_of(strategy: str, case: Case, folder: Path, used: list[pl.Callback], memory: Memory) -> pl.Trainer:
    """A trainer with the case's settings."""
    settings: dict[str, Any] = {"max_epochs": 3, "log_every_n_steps": 2}
    for options in (WHEN[case["when"]], LENGTH[case["length"]], CLIPPING[case["clipping"]], OPTIONS[case["options"]]):
        settings |= options
    if case["evaluation"] == "none":
        settings["limit_val_batches"] = 0
    return pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=DEVICES,
        precision=case["precision"],  # type: ignore[arg-type]
        accumulate_grad_batches=1 if case["callback"] == "scheduler" else int(case["accumulation"]),
        logger=[memory, CSVLogger(folder, "csv")],
        callbacks=used,
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in used),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **settings,
    )


def train(strategy: str, case: Case, folder: Path, kill: Kill | None) -> dict[str, Any]:
    """Trains a case; returns what is compared."""
    killing = None if kill is None else Killing(kill, folder)
    memory, module, data = Memory(), Net(case, folder, killing), Data(case, workers=strategy != "ddp")
    evaluated: list[Any] = []

    def fit(path: Path | None = None, *more: pl.Callback) -> pl.Trainer:
        module.fit += 1
        used = [*callbacks(case, folder), Hooks(module.calls), *more, *([] if killing is None else [killing])]
        trainer = trainer_of(strategy, case, folder, used, memory)
        if case["run"] == "datamodule":
            trainer.fit(module, datamodule=data, ckpt_path=path, weights_only=False)
        else:
            trainer.fit(module, data.train_dataloader(), data.val_dataloader(), ckpt_path=path, weights_only=False)
        return trainer

    resume = folder / "resume.ckpt"
    trainer = fit(None, *([Saving(resume)] if case["run"] == "resumed" else []))
    if case["run"] == "resumed":
        trainer = fit(resume)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    counters = (trainer.global_step, trainer.current_epoch)
    if case["run"] == "evaluated":
        evaluated += trainer.validate(module, data.val_dataloader(), verbose=False)
        evaluated += trainer.test(module, data.test_dataloader(), verbose=False)
    trainer.strategy.barrier()
    return {
        "state": module.state_dict(),
        "hooks": module.calls,
        "logged": memory.rows,
        "table": table(folder),
        "metrics": metrics,
        "evaluated": evaluated,
        "counters": counters,
        "checkpoints": checkpoints(folder),
        "replaces": killing is not None and killing.replaces,
        "joined_at": None if killing is None else killing.joined_at,
        "world": trainer.world_size,
    }


def main() -> None:
    out = Path(sys.argv[1])
    settings = json.loads((out / "settings.json").read_text())
    kill = Kill(**settings["kill"]) if settings.get("kill") else None
    for name, case in settings["cases"].items():
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        result = train(settings["strategy"], case, folder, kill)
        torch.save(result, out / f"{name}-{os.environ['RANK']}-{os.getpid()}.pt")
    if settings["strategy"] == "ddp":
        dist.destroy_process_group()  # its threads may otherwise end the process with an error at exit


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
