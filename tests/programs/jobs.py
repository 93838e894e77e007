"""Small trainings, each run under Lightning's ddp and under unicron, and their compared results.

As a script, under torchrun: ``jobs.py STRATEGY OUT CASE...`` trains each case and writes its results, per rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Job = dict[str, Any]
"""``module``, ``trainer`` keyword arguments, ``loader`` keyword arguments."""

DEVICES = 2
SAMPLES = 96


class Regression(pl.LightningModule):
    """Logs every kind of value; the keyword arguments select further features."""

    def __init__(
        self,
        optimizer: str = "sgd",
        scheduler: str = "",
        branch: str = "",
        tied: bool = False,
        metrics: bool = False,
        val_steps: bool = False,
    ) -> None:
        super().__init__()
        self.optimizer, self.scheduler, self.branch = optimizer, scheduler, branch
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
        if tied:
            self.net[3] = nn.Sequential(nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
            self.net[3][1].weight = self.net[2].weight
        self.extra = nn.Linear(6, 1) if branch in ("never", "alternate", "freeze") else None
        if branch == "buffers":
            self.register_buffer("average", torch.zeros(6))
            self.register_buffer("replaced", torch.zeros(6))
            self.register_buffer("codebook", torch.zeros(6))
            self.register_buffer("queue", torch.zeros(5, 6))
            self.register_buffer("place", torch.zeros((), dtype=torch.long))
            self.register_buffer("angles", torch.zeros(0), persistent=False)
        self.mean = nn.ModuleList(torchmetrics.MeanMetric() for _ in range(2))
        self.error = nn.ModuleList(torchmetrics.MeanSquaredError() for _ in range(2))
        self.concordance = torchmetrics.SpearmanCorrCoef()
        self.metrics = metrics
        self.val_steps = val_steps
        self.train_error, self.by_hand = torchmetrics.MeanSquaredError(), torchmetrics.SpearmanCorrCoef()
        self.history: list[tuple[Any, ...]] = []

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        out: Tensor = self.net(x)
        if self.branch == "buffers" and self.training:
            out = out + self._remember(x)
        if self.extra is not None and self.branch == "alternate" and self.trainer.global_step % 2:
            out = out + self.extra(x)
        return out

    def _remember(self, x: Tensor) -> Tensor:
        """Change buffers in all the ways that modules do; their contents are part of the output."""
        with torch.no_grad():
            mean = x.mean(0)
            self.average.mul_(0.9).add_(0.1 * mean)
            self.replaced = 0.5 * self.replaced + mean
            self.codebook.data.copy_(self.codebook.data - 0.1 * mean)
            self.queue[int(self.place)] = mean
            self.place.copy_((self.place + 1) % 5)
            self.angles = torch.arange(3.0)
        kept = self.average + self.replaced + self.codebook + self.queue.mean(0)
        return (self.net(x) * kept.mean()).clamp(-1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if isinstance(batch, dict):  # of several loaders
            parts = [part for part in batch.values() if part is not None]
            batch = [torch.cat(columns) for columns in zip(*parts, strict=True)]
        x, y = batch
        loss = (self(x) - y).square().mean()
        assert self.trainer.log_dir == self.log_dir
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, prog_bar=True)
        for name in ("sum", "min", "max"):
            self.log(f"x_{name}", x.sum(), on_step=False, on_epoch=True, sync_dist=True, reduce_fx=name)
        self.log("weighted", x.mean(), on_step=False, on_epoch=True, sync_dist=True, batch_size=7)
        if self.metrics:
            self.train_error(self(x), y)
            self.by_hand.update(self(x).flatten(), y.flatten())
            self.log("train_error", self.train_error, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.branch == "freeze" and self.trainer.global_step == 3:
            self.net[0].requires_grad_(False)

    def on_train_start(self) -> None:
        self.log_dir = self.trainer.log_dir

    def on_train_epoch_end(self) -> None:
        if self.metrics:
            self.log("by_hand", self.by_hand.compute())
            self.by_hand.reset()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm()
        self.history.append(("step", self.trainer.global_step, float(norm), optimizer.param_groups[0]["lr"]))

    def _evaluate(self, batch: Any, prefix: str, loader: int = 0) -> None:
        x, y = batch
        out = self(x)
        self.log(f"{prefix}_loss", (out - y).square().mean(), sync_dist=True)
        if self.val_steps:
            self.log(f"{prefix}_both", out.mean(), sync_dist=True, on_step=True, on_epoch=True)
            self.log(f"{prefix}_step_only", y.sum(), sync_dist=True, reduce_fx="sum", on_step=True, on_epoch=False)
        self.log(f"{prefix}_worst", (out - y).square().mean(), sync_dist=True, reduce_fx="max")
        self.log(f"{prefix}_max", x.max(), sync_dist=True, reduce_fx="max")
        self.log(f"{prefix}_sum", x.sum(), sync_dist=True, reduce_fx=torch.sum)
        self.mean[loader](out.mean(), weight=len(x))
        self.error[loader](out, y)
        if loader == 0:
            self.concordance.update(out.flatten(), y.flatten())
        self.log(f"{prefix}_mean", self.mean[loader])
        self.log(f"{prefix}_error", self.error[loader])

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate(batch, "val", dataloader_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def on_validation_epoch_end(self) -> None:
        self.log("val_concordance", self.concordance.compute(), sync_dist=True)
        self.concordance.reset()

    def on_validation_end(self) -> None:
        metrics = {key: float(value) for key, value in self.trainer.callback_metrics.items()}
        if not self.trainer.sanity_checking:
            self.history.append(("validation", self.trainer.global_step, metrics))

    def configure_optimizers(self) -> Any:
        kinds: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
            "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, eps=1e-3),
        }
        optimizer = kinds[self.optimizer](self.parameters())
        match self.scheduler:
            case "step":
                scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
            case "epoch":
                return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]
            case "plateau":
                plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}
        return optimizer


def samples(number: int = SAMPLES, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(number, 6, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def job(module: Job | None = None, loader: Job | None = None, val: int = 1, mode: str = "", **trainer: Any) -> Job:
    """Return a case; with a mode its training data has two loaders."""
    own = {"module": module or {}, "loader": loader or {}, "val": val, "mode": mode}
    return own | {"trainer": {"max_epochs": 3} | trainer}


class HookLogging(pl.Callback):
    """Logs values that differ between ranks in hooks outside the steps, to be reduced."""

    def _log(self, module: Any, name: str, **settings: Any) -> None:
        world = module.trainer.world_size
        rank = float(module.global_rank) if world > 1 else (DEVICES - 1) / 2
        module.log(f"{name}_mean", rank, sync_dist=True, **settings)
        module.log(f"{name}_sum", 1.0 / world, sync_dist=True, reduce_fx="sum", **settings)

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._log(module, "train_start")

    def on_train_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._log(module, "epoch_start")

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        self._log(module, "batch_start", on_step=True, on_epoch=False)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        self._log(module, "batch_end", on_step=True, on_epoch=True, batch_size=3)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._log(module, "epoch_end")

    def on_validation_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._log(module, "val_start")

    def on_validation_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._log(module, "val_end")

    def on_test_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._log(module, "test_end")


class Peeking(pl.Callback):
    """Reads samples of the trainer's loaders directly, on all ranks and on the first one only."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def _look(self, loader: Any) -> None:
        batches = iter(loader)
        self.seen.append((len(loader), loader.batch_size, *next(batches)[0].sum(1).tolist()))

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._look(trainer.train_dataloader)

    def on_train_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._look(trainer.train_dataloader)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.is_global_zero and trainer.val_dataloaders is not None:
            self._look(trainer.val_dataloaders)

    def on_validation_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._look(trainer.val_dataloaders)

    def on_validation_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.is_global_zero and args[-2] == 0:  # a world of one runs more batches than each rank of two
            self._look(trainer.val_dataloaders)


class TorchDistributed(pl.Callback):
    """Exchanges values by `torch.distributed` itself, between steps."""

    def _exchange(self, module: Any, name: str) -> None:
        assert dist.is_initialized()
        rank, world = dist.get_rank(), dist.get_world_size()
        assert (rank, world) == (module.global_rank, module.trainer.world_size)
        mean = torch.tensor(float(rank) if world > 1 else (DEVICES - 1) / 2)
        dist.all_reduce(mean)
        gathered: list[Any] = [None] * world
        dist.all_gather_object(gathered, {"rank": rank})
        assert gathered == [{"rank": other} for other in range(world)]
        shared = [f"from {rank}"]
        dist.broadcast_object_list(shared, src=world - 1)
        assert shared == [f"from {world - 1}"]
        parts = [torch.zeros(2) for _ in range(world)]
        dist.all_gather(parts, torch.full((2,), float(rank)))
        assert [int(part[0]) for part in parts] == list(range(world))
        dist.barrier()
        module.log(name, mean / world)

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._exchange(module, "dist_start")

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._exchange(module, "dist_epoch")

    def on_validation_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._exchange(module, "dist_val")


CASES: dict[str, Callable[[], Job]] = {
    # Those with processes of a loader come first: the reference is run again if one of them hangs in its fork.
    "workers": lambda: job(loader={"num_workers": 2}),
    "several_shortest": lambda: job(mode="min_size", loader={"num_workers": 1}),
    "sgd": job,
    "sgd_accumulate": lambda: job(accumulate_grad_batches=3),
    "adamw": lambda: job({"optimizer": "adamw"}),
    "adamw_accumulate_clip_norm": lambda: job({"optimizer": "adamw"}, accumulate_grad_batches=3, gradient_clip_val=0.1),
    "clip_value": lambda: job(gradient_clip_val=0.01, gradient_clip_algorithm="value"),
    "scheduler_step": lambda: job({"scheduler": "step"}),
    "scheduler_epoch": lambda: job({"scheduler": "epoch"}),
    "scheduler_plateau": lambda: job({"scheduler": "plateau"}),
    "bf16": lambda: job({"optimizer": "adamw"}, precision="bf16-mixed"),
    "double": lambda: job({"optimizer": "adamw"}, precision="64-true"),
    "unused": lambda: job({"branch": "never", "optimizer": "adamw"}),
    "alternate": lambda: job({"branch": "alternate", "optimizer": "adamw"}),
    "freeze": lambda: job({"branch": "freeze"}),
    "buffers": lambda: job({"branch": "buffers"}),
    "tied": lambda: job({"tied": True}),
    "in_order": lambda: job(loader={"shuffle": False}),
    "peeking": lambda: job(callbacks=[Peeking()]),
    "peeking_unchecked": lambda: job(callbacks=[Peeking()], num_sanity_val_steps=0),
    "limits": lambda: job(limit_train_batches=5, limit_val_batches=2),
    "limits_float": lambda: job(limit_train_batches=0.5, limit_val_batches=0.5),
    "val_interval": lambda: job(val_check_interval=4),
    "val_interval_float": lambda: job(val_check_interval=0.5),
    "val_time": lambda: job(val_check_interval=timedelta(microseconds=1)),
    "val_every_2": lambda: job(check_val_every_n_epoch=2, max_epochs=4),
    "max_steps": lambda: job(max_steps=17, max_epochs=-1),
    "several_val": lambda: job(val=2),
    "early_stopping": lambda: job(max_epochs=9, callbacks=[EarlyStopping("val_loss", min_delta=0.3, patience=1)]),
    "fast_dev_run": lambda: job(fast_dev_run=True),
    "overfit": lambda: job(overfit_batches=2),
    "checkpoints": lambda: job(
        callbacks=[
            ModelCheckpoint("top", "{epoch}-{step}", monitor="val_loss", save_top_k=2, save_last=True),
            ModelCheckpoint("every", "{epoch}-{step}", every_n_train_steps=5, save_top_k=-1),
        ]
    ),
    "saved_accumulate": lambda: job(
        accumulate_grad_batches=2,
        callbacks=[ModelCheckpoint("every", "{epoch}-{step}", every_n_train_steps=4, save_top_k=-1)],
    ),
    "train_metrics_accumulate": lambda: job({"metrics": True}, accumulate_grad_batches=3),
    "hook_logging": lambda: job(callbacks=[HookLogging()]),
    "several_cycle_accumulate": lambda: job(mode="max_size_cycle", accumulate_grad_batches=2),
    "several_longest": lambda: job(mode="max_size", limit_train_batches=11),
    "several_half": lambda: job(mode="max_size_cycle", limit_train_batches=0.5),
    "val_steps": lambda: job({"val_steps": True}, val=2, logger=CSVLogger("."), log_every_n_steps=2),
    "torch_distributed": lambda: job({"metrics": True}, callbacks=[TorchDistributed()]),
    "loggers": lambda: job(
        {"scheduler": "step"}, callbacks=[LearningRateMonitor("step")], logger=CSVLogger("."), log_every_n_steps=2
    ),
}


def loaders(made: Job) -> tuple[Any, Any]:
    options = {"batch_size": 4, "shuffle": True} | made["loader"]
    train: Any = DataLoader(samples(), **options)
    if made["mode"]:
        several = {"long": train, "short": DataLoader(samples(40, seed=7), **options)}
        train = several if made["mode"] == "max_size_cycle" else CombinedLoader(several, made["mode"])
    val = [DataLoader(samples(36 + 8 * i, seed=1 + i), batch_size=4) for i in range(made["val"])]
    return train, val[0] if len(val) == 1 else val


def train(name: str, strategy: Any, folder: Path, ckpt: Path | None = None, **changes: Any) -> dict[str, Any]:
    """Trains a case, from a checkpoint if one is given; returns what is compared."""
    folder.mkdir(parents=True, exist_ok=True)
    made = CASES[name]()
    module = Regression(**made["module"])
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": DEVICES,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in made["trainer"].get("callbacks", [])),
        "default_root_dir": folder,
    } | made["trainer"]
    for callback in settings.get("callbacks", []):
        if isinstance(callback, ModelCheckpoint):
            callback.dirpath = str(folder / str(callback.dirpath).rsplit("/", 1)[-1])
    if settings["logger"]:
        settings["logger"] = CSVLogger(folder, name="csv", version=0)
    trainer = pl.Trainer(strategy=strategy, **settings | changes)
    trainer.fit(module, *loaders(made), ckpt_path=ckpt, weights_only=False)
    result = {
        "state": module.state_dict(),
        "history": module.history,
        "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
        "counters": (trainer.global_step, trainer.current_epoch, trainer.should_stop),
    }
    if not settings.get("fast_dev_run"):
        tested = trainer.test(module, DataLoader(samples(40, 9), batch_size=4), verbose=False)
        result["test"] = tested
    result["seen"] = [callback.seen for callback in settings.get("callbacks", []) if isinstance(callback, Peeking)]
    trainer.strategy.barrier()
    result["files"] = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.ckpt"))
    csv = folder / "csv/version_0/metrics.csv"
    result["csv"] = csv.read_text().splitlines() if csv.exists() else []
    return result


def main() -> None:
    strategy, out, *names = sys.argv[1:]
    for name in names:
        chosen = strategy
        if strategy == "ddp" and CASES[name]()["module"].get("branch"):
            chosen = "ddp_find_unused_parameters_true"
        result = train(name, chosen, Path(out) / name)
        rank = int(os.environ["RANK"])
        torch.save(result, Path(out) / f"{name}-{rank}.pt")
        print("DONE", name, rank, flush=True)


if __name__ == "__main__":
    main()
