"""Trainings whose result must not depend on the world: as a script under torchrun, ``scenarios.py OUT``; or called."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from zoo.gan import Gan, points


class Net(pl.LightningModule):
    """Dropout, batch norm, a metric object and hooks that communicate."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(int(os.environ.get("RANK", "0")))  # ranks differ, and rank 0's parameters count
        self.net = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.error = torchmetrics.MeanSquaredError()
        self.gathered: list[Any] = []
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = (self.net(x) - y).square().mean()
        self.log_dict({"loss": loss, "largest": x.max()}, on_step=True, on_epoch=True)
        self.log("minimum", x.min(), reduce_fx="min", on_epoch=True, on_step=False)
        return {"loss": loss, "extra": x.sum()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_train_epoch_end(self) -> None:
        rank, world = self.global_rank, self.trainer.world_size
        assert self.all_gather(torch.tensor(rank)).flatten().tolist() == list(range(world))
        assert self.trainer.strategy.broadcast({"a": [rank]}, world - 1) == {"a": [world - 1]}
        total = self.trainer.strategy.reduce(torch.tensor(float(rank)), reduce_op="sum")
        assert float(total) == world * (world - 1) / 2
        self.gathered.append(world)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.error(self.net(x), y)
        self.log("error", self.error)
        self.log("val", (self.net(x) - y).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-3)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loader(number: int, **settings: Any) -> DataLoader[Any]:
    x = torch.randn(number, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, **settings)


def fit(folder: Path, number: int = 47, ckpt: Path | None = None, **settings: Any) -> dict[str, Any]:
    pl.seed_everything(3, verbose=False)
    module = Net()
    basic: dict[str, Any] = {
        "strategy": "unicron",
        "accelerator": "cpu",
        "max_epochs": 2,
        "default_root_dir": folder,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = pl.Trainer(**basic | settings)
    workers = {"num_workers": 1, "persistent_workers": True}
    trainer.fit(module, loader(number, shuffle=True, **workers), loader(19), ckpt_path=ckpt, weights_only=False)
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    alone = trainer.validate(module, loader(19), verbose=False)
    return {"state": module.state_dict(), "losses": module.losses, "metrics": metrics, "alone": alone[0]}


def fit_manually(folder: Path) -> dict[str, Any]:
    """A GAN; the last step of an epoch has one micro-batch, of one sample."""
    pl.seed_everything(3, verbose=False)
    module = Gan()
    module.generator[1] = nn.Identity()
    settings: dict[str, Any] = {"strategy": "unicron", "accelerator": "cpu", "max_epochs": 2, "devices": 3}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(**settings, default_root_dir=folder, enable_checkpointing=False, **quiet)
    trainer.fit(module, points(49, 4))
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    metrics["steps"] = trainer.global_step
    return {"state": module.state_dict(), "losses": [], "metrics": metrics, "alone": {}}


def run(folder: Path) -> dict[str, dict[str, Any]]:
    """Run all scenarios, one after the other."""
    saving = ModelCheckpoint(folder / "ck", "{step}", every_n_train_steps=5, save_top_k=-1)
    results = {
        "uneven": fit(folder, devices=3, callbacks=[saving], enable_checkpointing=True),
        "resumed": fit(folder, devices=3, ckpt=folder / "ck" / "step=5.ckpt"),
        "few": fit(folder, number=16, devices=2),
        "accumulate": fit(folder, devices=2, accumulate_grad_batches=3, gradient_clip_val=0.5),
        "manual": fit_manually(folder),
    }
    saved = torch.load(folder / "ck" / "step=5.ckpt", weights_only=False)
    results["checkpoint"] = {"keys": sorted(saved), "step": saved["global_step"], "weights": saved["state_dict"]}
    return results


if __name__ == "__main__":
    out = Path(sys.argv[1])
    given = run(out)
    torch.save(given, out / f"result-{os.environ['RANK']}.pt")
