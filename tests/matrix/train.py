"""Trains cases of the matrix and records what is compared: under torchrun, ``train.py STRATEGY OUT CASE...``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from features import LOADERS, LOGGING, OPTIMIZERS, TRAINER, Case, cases
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import Logger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

DEVICES = 2
BATCH = 4


class Memory(Logger):
    """Keeps each row that rank 0 logs."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, {name: float(value) for name, value in metrics.items()}))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class Hooks(pl.Callback):
    """Notes each hook: its name, and the types of its arguments beyond trainer and module."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []


def _noting(name: str) -> Any:
    def hook(self: Hooks, *args: Any, **kwargs: Any) -> None:
        batch = "batch_start" in name or "batch_end" in name  # a batch of another class is one of the documented things
        self.calls.append((name, *(() if batch else (type(each).__name__ for each in args[2:]))))

    return hook


for _name in dir(pl.Callback):
    if _name.startswith("on_") and "checkpoint" not in _name:
        setattr(Hooks, _name, _noting(_name))


class Peeking(pl.Callback):
    """Looks at a batch of the loaders by itself, on rank 0 only."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.is_global_zero and trainer.val_dataloaders is not None:
            next(iter(trainer.val_dataloaders))
            next(iter(trainer.train_dataloader))  # type: ignore[call-overload]


class Net(pl.LightningModule):
    """Logs as the case has it, in a step and in hooks."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.case = case
        self.batches: list[tuple[int, list[float]]] = []

    def _loss(self, batch: Any) -> Any:
        x, y = batch
        return (self.net(x) - y).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batches.append((self.trainer.global_step, sorted(batch[0].sum(1).tolist())))
        loss = self._loss(batch)
        self.log("loss", loss, **LOGGING[self.case["logging"]])
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"], sync_dist=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self._loss(batch), **LOGGING[self.case["logging"]])
        self.log("val_loss", self._loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[self.case["optimizer"]]
        optimizer = kind(self.parameters(), **OPTIMIZERS[self.case["optimizer"]])
        rates = torch.optim.lr_scheduler
        match self.case["scheduler"]:
            case "per_step":
                return [optimizer], [{"scheduler": rates.StepLR(optimizer, 2, 0.9), "interval": "step"}]
            case "per_epoch":
                return [optimizer], [rates.ExponentialLR(optimizer, 0.5)]
            case "plateau":
                plateau = rates.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "loss_at_end"}}
            case "one_cycle":
                total = int(self.trainer.estimated_stepping_batches)
                cycle = rates.OneCycleLR(optimizer, 0.1, total_steps=total + 1)
                return [optimizer], [{"scheduler": cycle, "interval": "step"}]
        return optimizer

    def on_train_epoch_start(self) -> None:
        self.log("loss_at_end", 1.0 / (1 + self.current_epoch), sync_dist=True)


def callbacks(case: Case, folder: Path) -> list[pl.Callback]:
    made: dict[str, list[pl.Callback]] = {
        "early_stopping": [EarlyStopping("val_loss", min_delta=0.2, patience=1)],
        "top_k": [ModelCheckpoint(folder, "{epoch}-{step}", monitor="val_loss", save_top_k=2, save_last=True)],
        "every_steps": [ModelCheckpoint(folder, "{epoch}-{step}", every_n_train_steps=3, save_top_k=-1)],
        "rates": [LearningRateMonitor("step")],
        "averaging": [StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=1)],
        "peeking": [Peeking()],
    }
    return made.get(case["callback"], [])


def data(samples: int, seed: int) -> TensorDataset:
    x = torch.randn(samples, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def train(strategy: str, case: Case, folder: Path) -> dict[str, Any]:
    """Trains a case; returns what is compared."""
    hooks, memory, module = Hooks(), Memory(), Net(case)
    used = callbacks(case, folder)
    settings: dict[str, Any] = {"max_epochs": 3, "log_every_n_steps": 2} | TRAINER[case["trainer"]]
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=DEVICES,
        precision=case["precision"],  # type: ignore[arg-type]
        logger=memory,
        callbacks=[*used, hooks],
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in used),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **settings,
    )
    training = DataLoader(data(48, 0), batch_size=BATCH, **LOADERS[case["loader"]])
    trainer.fit(module, training, DataLoader(data(24, 1), batch_size=BATCH))
    trainer.strategy.barrier()
    saved = {}
    for path in sorted(folder.glob("*.ckpt")):
        checkpoint = torch.load(path, weights_only=False)
        saved[path.name] = (sorted(checkpoint["callbacks"]), checkpoint["epoch"], checkpoint["state_dict"])
    return {
        "state": module.state_dict(),
        "hooks": hooks.calls,
        "logged": memory.rows,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "batches": module.batches,
        "counters": (trainer.global_step, trainer.current_epoch),
        "checkpoints": saved,
    }


def main() -> None:
    strategy, out, *names = sys.argv[1:]
    rank = int(os.environ["RANK"])
    for name, case in cases():
        if name not in names:
            continue
        folder = Path(out) / name
        folder.mkdir(parents=True, exist_ok=True)
        result = train(strategy, case, folder)
        torch.save(result, Path(out) / f"{name}-{rank}.pt")
    if strategy.startswith("ddp"):
        dist.destroy_process_group()  # its threads may otherwise end the process with an error at exit


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
