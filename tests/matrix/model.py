"""Module and data of a case."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from matrix.features import LOADERS, LOGGING, Case
from matrix.killing import Killing
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

BATCH = 4
SAMPLES = {"drop_last": 67, "uneven": 61}
"""Training samples, where they are not 64: drop_last needs some to drop."""
VALIDATION_SAMPLES = {"uneven": 23}
REDUCTIONS = {"": "mean", "_total": "sum", "_low": "min", "_high": "max"}


class Net(pl.LightningModule):
    """Logs as the case has it, in steps and in hooks.

    Args:
        case: the features.
        folder: for the contents of batches.
        killing: called in steps.
    """

    def __init__(self, case: Case, folder: Path, killing: Killing | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.case, self.killing = case, killing
        self.fit = 0
        self.lr = 0.05
        self.calls: list[tuple[str, ...]] = []
        self._file = folder / f"batches-{os.getpid()}.jsonl"
        self._vary()
        self._measure()

    def _vary(self) -> None:
        """Add the feature of the axis ``model``."""
        match self.case["model"]:
            case "frozen":
                self.net[0].requires_grad_(False)
            case "tied":
                self.net[3] = nn.Sequential(nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
                self.net[3][1].weight = self.net[2].weight
            case "buffers":
                self.register_buffer("seen", torch.zeros(6))
            case "norms":
                self.net[1] = nn.Sequential(nn.BatchNorm1d(8), nn.Tanh())

    def _measure(self) -> None:
        """Add the metric objects of the axis ``metrics``: per stage and data loader."""
        kinds = {"train": 1, "val": 2, "test": 1}
        kind = self.case["metrics"]
        if kind == "collection":
            alike = {"error": torchmetrics.MeanSquaredError(), "root": torchmetrics.MeanSquaredError(squared=False)}
            whole = torchmetrics.MetricCollection({**alike, "rank": torchmetrics.SpearmanCorrCoef()})
            sets = {s: [whole.clone(prefix=f"{s}{i}_") for i in range(number)] for s, number in kinds.items()}
            self.objects = nn.ModuleDict({f"{s}_set": nn.ModuleList(each) for s, each in sets.items()})
        elif kind != "none":
            errors = {s: [torchmetrics.MeanSquaredError() for _ in range(number)] for s, number in kinds.items()}
            self.objects = nn.ModuleDict({f"{s}_set": nn.ModuleList(each) for s, each in errors.items()})

    def _note(self, stage: str, loader: int, batch: Any) -> None:
        content = sorted(round(float(value), 4) for value in batch[0].sum(1))
        with self._file.open("a") as file:
            file.write(
                json.dumps([f"fit {self.fit}, {stage} {loader}, step {self.trainer.global_step}", content]) + "\n"
            )

    def _step(self, stage: str, batch: Any, loader: int = 0) -> Any:
        x, y = batch
        self._note(f"{stage} of sanity" if self.trainer.sanity_checking else stage, loader, batch)
        out = self.net(x)
        loss = (out - y).square().mean()
        options = LOGGING_OF.get(self.case["logging"], LOGGING.get(self.case["logging"], {}))
        for suffix, reduction in REDUCTIONS.items():
            self.log(f"{stage}{suffix}", loss, **options, **({} if reduction == "mean" else {"reduce_fx": reduction}))
        if self.case["metrics"] != "none":
            measured = self.objects[f"{stage}_set"][loader]  # type: ignore[index]
            measured(out.flatten(), y.flatten())
            on_step = self.case["metrics"] == "steps" and stage == "train"
            if self.case["metrics"] == "collection":
                self.log_dict(measured, on_step=False, on_epoch=True)
            else:
                self.log(f"{stage}_error", measured, on_step=on_step, on_epoch=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.killing is not None:
            self.killing.strike(self.trainer, "training")
        if self.case["model"] == "buffers":
            with torch.no_grad():
                self.seen.mul_(0.9).add_(0.1 * batch[0].mean(0))
        return self._step("train", batch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if self.killing is not None and not self.trainer.sanity_checking:
            self.killing.strike(self.trainer, "validation")
        loss = self._step("val", batch, dataloader_idx)
        self.log("val_loss", loss, sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._step("test", batch)

    def on_train_epoch_start(self) -> None:
        self.log("loss_at_end", 1.0 / (1 + self.current_epoch), sync_dist=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.case["accumulation"] == "1":
            self.log("stepped", float(self.trainer.global_step), on_step=True, on_epoch=True, sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"], sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.log("validated", float(self.trainer.global_step), sync_dist=True, reduce_fx="max")

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.calls.append(("module.configure_gradient_clipping", type(optimizer).__name__))
        super().configure_gradient_clipping(optimizer, *args, **kwargs)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.calls.append(("module.lr_scheduler_step", type(scheduler).__name__, type(metric).__name__))
        super().lr_scheduler_step(scheduler, metric)

    def optimizer_zero_grad(self, *args: Any) -> None:
        self.calls.append(("module.optimizer_zero_grad", type(args[-1]).__name__))
        super().optimizer_zero_grad(*args)

    def configure_optimizers(self) -> Any:
        match self.case["optimizer"]:
            case "sgd":
                optimizer: Any = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
            case "adamw":
                optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-3)
            case _:
                last = list(self.net[4].parameters())
                rest = [p for p in self.parameters() if not any(p is other for other in last)]
                optimizer = torch.optim.SGD([{"params": rest}, {"params": last, "lr": 0.01}], lr=0.05, momentum=0.9)
        return self._scheduled(optimizer)

    def _scheduled(self, optimizer: Any) -> Any:
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


LOGGING_OF: dict[str, dict[str, Any]] = {"local": {"on_step": True, "on_epoch": True}}
"""Options of `EXTRA` cases."""


class Backwards(Sampler[int]):
    """An order of the user's own."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._size - 1, -1, -1))

    def __len__(self) -> int:
        return self._size


class Data(pl.LightningDataModule):
    """The loaders of a case.

    Args:
        case: the features.
        workers: whether loaders may have worker processes.
    """

    def __init__(self, case: Case, workers: bool) -> None:
        super().__init__()
        self.case, self.workers = case, workers

    def train_dataloader(self) -> DataLoader[Any]:
        name = self.case["loader"]
        data = samples(SAMPLES.get(name, 64), 0)
        options = dict(LOADERS.get(name, {"shuffle": True}))
        if name == "own_sampler":
            options = {"sampler": Backwards(len(data))}
        if not self.workers:
            options.pop("num_workers", None)
        return DataLoader(data, batch_size=BATCH, **options)

    def val_dataloader(self) -> Any:
        kind = self.case["evaluation"]
        size = 6 if kind == "other_size" else BATCH
        number = VALIDATION_SAMPLES.get(self.case["loader"], 24)
        one = DataLoader(samples(number, 1), batch_size=size, shuffle=kind == "shuffled")
        return [one, DataLoader(samples(16, 2), batch_size=BATCH)] if kind == "two_loaders" else one

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(samples(32, 3), batch_size=BATCH)


def samples(number: int, seed: int) -> TensorDataset:
    x = torch.randn(number, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sum(1, keepdim=True).sin())
