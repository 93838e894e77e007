"""A training that changes while it runs, and whose workers are terminated at points chosen by the test.

Under torchrun agents: ``changing_worker.py FOLDER``, until the folder has a file ``finish``. Called as a function: the
same training in a world of one, for a number of epochs.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

DEVICES = 2
BATCH = 4
SAMPLES = 41
"""An epoch's last step is one micro-batch of one sample: in a world of two the second worker has none of it."""
VALIDATION_BATCHES = (1, 3, 1)
"""Batches of each loader. In a world of two the second worker has none of the first and the last loader."""
THAW_STEP, FREEZE_STEP = 3, 5
PACE_SECONDS = 0.05


class Notes:
    """This process's notes for the test: JSON lines, and files that order its termination."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, what: str, **fields: Any) -> None:
        line = json.dumps({"what": what, "pid": os.getpid(), **fields})
        with (self.folder / "events.jsonl").open("a") as file:
            file.write(line + "\n")

    def point(self, name: str) -> None:
        """A point at which the test may terminate this process, the next time it is reached."""
        order = self.folder / f"terminate-{name}-{os.getpid()}"
        if order.exists():
            order.unlink()
            os.kill(os.getpid(), signal.SIGTERM)


class Net(pl.LightningModule):
    """``extra`` is frozen, and unknown to the optimizer, until a callback changes both; later ``base`` is frozen."""

    def __init__(self, notes: Notes, pace: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(4, 8, bias=False)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 1)
        self.extra = nn.Linear(4, 1)
        self.extra.requires_grad_(False)
        self.errors = nn.ModuleList(torchmetrics.MeanSquaredError() for _ in VALIDATION_BATCHES)
        self.largest = nn.ModuleList(torchmetrics.MaxMetric() for _ in VALIDATION_BATCHES)
        self.trained = torchmetrics.MetricCollection([torchmetrics.MeanSquaredError(), torchmetrics.PearsonCorrCoef()])
        self.notes, self.pace = notes, pace

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)
        out: torch.Tensor = self.head(self.norm(self.base(rows)).tanh()) + self.extra(rows)
        return out.view(*x.shape[:2], 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.notes.point("training_step")
        time.sleep(self.pace)
        x, y = batch
        out = self(x)
        self.trained(out.flatten(), y.flatten())
        self.log_dict({f"train_{name}": metric for name, metric in self.trained.items()}, on_step=True, on_epoch=True)
        return (out - y).square().mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.notes.point("validation_step")
        x, y = batch
        out = self(x)
        self.errors[dataloader_idx](out, y)
        self.largest[dataloader_idx].update(x)
        self.log("error", self.errors[dataloader_idx])
        self.log("largest", self.largest[dataloader_idx])
        self.log("plain", (out - y).square().mean())

    def configure_optimizers(self) -> Any:
        parts = [*self.base.parameters(), *self.norm.parameters(), *self.head.parameters()]
        return torch.optim.SGD(parts, lr=0.02, momentum=0.9)


class Changes(pl.Callback):
    """Changes the trained parameters; records steps; ends the run once allowed and all workers are present."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes

    def on_train_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        module.log("hook_epoch", float(trainer.current_epoch), sync_dist=True)
        self.notes.point("epoch_start")

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == THAW_STEP:
            module.extra.requires_grad_(True)
            trainer.optimizers[0].add_param_group({"params": list(module.extra.parameters()), "lr": 0.005})
        if trainer.global_step == FREEZE_STEP:
            module.base.requires_grad_(False)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        module.log("hook_rate", 1.0, on_step=True, on_epoch=True, batch_size=1)
        self.notes.write("step", step=trainer.global_step, world=trainer.world_size, rank=trainer.global_rank)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        module.log("hook_lr", trainer.optimizers[0].param_groups[0]["lr"])
        module.log("hook_share", 1.0 / trainer.world_size, sync_dist=True, reduce_fx="sum")
        if trainer.max_epochs == -1:
            enough = trainer.world_size == DEVICES and (self.notes.folder / "finish").exists()
            trainer.should_stop = bool(trainer.strategy.broadcast(enough, 0))


def data(samples: int, seed: int) -> TensorDataset:
    """Data set with samples of three rows each, which is enough for batch norm."""
    x = torch.randn(samples, 3, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sum(-1, keepdim=True).sin())


def validation_data() -> list[TensorDataset]:
    return [data(batches * BATCH, 2 + place) for place, batches in enumerate(VALIDATION_BATCHES)]


def train(folder: Path, epochs: int, pace: float) -> dict[str, Any]:
    """Train; return results that must not depend on the workers."""
    pl.seed_everything(3, verbose=False)
    notes = Notes(folder)
    module = Net(notes, pace)
    trainer = pl.Trainer(
        strategy="unicron",
        accelerator="cpu",
        devices=DEVICES,
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        callbacks=[Changes(notes)],
    )
    validation = [DataLoader(part, batch_size=BATCH) for part in validation_data()]
    before = trainer.validate(module, validation, verbose=False)
    notes.write("validated", results=before)
    trainer.fit(module, DataLoader(data(SAMPLES, 1), batch_size=BATCH, shuffle=True), validation)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    (optimizer,) = trainer.optimizers
    return {
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "state": module.state_dict(),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "trained": [name for name, parameter in module.named_parameters() if parameter.requires_grad],
        "groups": [(group["lr"], [names[id(p)] for p in group["params"]]) for group in optimizer.param_groups],
        "momenta": {names[id(p)]: state["momentum_buffer"] for p, state in optimizer.state.items()},
    }


if __name__ == "__main__":
    out = Path(sys.argv[1])
    result = train(out, -1, PACE_SECONDS)
    torch.save(result, out / f"result-{os.getpid()}.pt")
