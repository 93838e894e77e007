"""Trains a model of the zoo, as a script: ``train.py FOLDER``; ``settings.json`` in the folder has the case."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision


class Killed(pl.Callback):
    """Kills a worker once, at its n-th step of an optimizer, forward or backward; the others wait for a successor.

    Args:
        folder: of the mark that a worker has been killed.
        world: number of workers of the complete world.
        at: ``forward``, ``backward`` or ``optimizer``.
        number: of the call.
        rank: of the worker.
        delay: seconds from the call to the kill.
    """

    def __init__(self, folder: Path, world: int, at: str, number: int, rank: int, delay: float = 0.0) -> None:
        self._mark, self._at, self._number, self._rank, self._count = folder / "killed", at, number, rank, 0
        self._world, self._delay = world, delay
        self.replaces = self._mark.exists()

    def _strike(self, trainer: pl.Trainer, at: str) -> None:
        if at != self._at or self._mark.exists() or trainer.global_rank != self._rank:
            return
        if trainer.world_size < self._world:
            return
        self._count += 1
        if self._count == self._number:
            self._mark.touch()
            if self._delay:
                threading.Timer(self._delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
            else:
                os.kill(os.getpid(), signal.SIGKILL)

    def on_before_optimizer_step(self, trainer: pl.Trainer, *args: Any) -> None:
        self._strike(trainer, "optimizer")

    def on_before_backward(self, trainer: pl.Trainer, *args: Any) -> None:
        self._strike(trainer, "backward")

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        step = pl_module.training_step

        def training_step(*args: Any, **kwargs: Any) -> Any:
            self._strike(trainer, "forward")
            return step(*args, **kwargs)

        pl_module.training_step = training_step  # type: ignore[method-assign]

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if self._mark.exists() and trainer.world_size < self._world and not self.replaces:
            time.sleep(0.05)


def main() -> None:
    out = Path(sys.argv[1])
    settings = json.loads((out / "settings.json").read_text())
    module_name, _, factory = settings["model"].partition(":")
    source = importlib.import_module(f"zoo.{module_name}")
    pl.seed_everything(3, verbose=False)
    module = getattr(source, factory)()
    callbacks: list[pl.Callback] = [getattr(source, name)() for name in settings.get("callbacks", ())]
    workers, of_ddp = settings.get("workers", 2), settings["strategy"] == "ddp"
    declared = settings.get("declared", workers)
    options = settings.get("trainer", {})
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    if options.get("precision") == "16-mixed":  # Lightning itself would take bf16-mixed on a CPU
        options = {**options, "precision": None, "plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
    killed = Killed(out, workers, *settings["kill"]) if settings.get("kill") else None
    trainer = pl.Trainer(
        strategy="ddp_find_unused_parameters_true" if of_ddp else settings["strategy"],
        accelerator="cpu",
        devices=declared if of_ddp else 1,
        max_epochs=settings.get("passes", 3),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=out,
        callbacks=[*callbacks, *([killed] if killed else [])],
        **{"limit_val_batches": 0, "num_nodes": 1 if of_ddp else declared} | options,
    )
    trainer.fit(module, source.loader())
    result = {
        "state": {name: value.cpu() for name, value in module.state_dict().items()},
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "scaler": trainer.precision_plugin.state_dict(),
        "optimizers": [each.state_dict() for each in trainer.optimizers],
        "steps": trainer.global_step,
        "replaces": killed is not None and killed.replaces,
    }
    torch.save(result, out / f"result-{trainer.global_rank}.pt")
    if settings["strategy"] == "ddp":
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
