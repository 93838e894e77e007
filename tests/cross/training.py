"""Trains the script of a case, in a world with its deaths, or alone without any."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from cross.cases import Case, Script, Strike
from joins.scripts import HalfRates, RateAtStart, ScaledWeights
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from unicron_lightning import UnicronFSDPStrategy
from unicron_lightning.callbacks import MemoryCheckpoint, UnicronCheckpoint

PATIENCE_SECONDS = 8.0
"""Most that survivors wait for a replacement: it may wait for them elsewhere."""


class Strikes(pl.Callback):
    """Kills workers as a history says.

    Args:
        case: has the history.
        folder: for marks, which all workers share.
    """

    def __init__(self, case: Case, folder: Path) -> None:
        self._case, self._folder = case, folder
        self.fit = 0
        self._expected = 0
        self._replaces = bool(self._died())

    def at(self, point: str, trainer: pl.Trainer) -> None:
        """Die if it is time."""
        for number, strike in enumerate(self._case.strikes):
            if strike.point == point and self._is_due(strike, trainer) and self._claim(number, strike, trainer):
                if strike.signal == 0:
                    raise RuntimeError(f"strike {number}")
                os.kill(os.getpid(), strike.signal)

    def wait(self, trainer: pl.Trainer) -> None:
        """Wait until the replacement of a worker that has died may be admitted."""
        died = len(self._died())
        if self._replaces or not self._case.waits or died <= self._expected:
            return
        self._expected = died
        engine: Any = trainer.strategy.engine  # type: ignore[attr-defined]
        limit = time.monotonic() + PATIENCE_SECONDS
        while not engine.control.newer_than(engine.world.epoch) and trainer.world_size < trainer.num_nodes:
            if time.monotonic() > limit:
                return
            time.sleep(0.01)

    def _is_due(self, strike: Strike, trainer: pl.Trainer) -> bool:
        rank = trainer.global_rank
        if strike.joiner and not self._replaces:
            return False
        return strike.fit == self.fit and trainer.global_step >= strike.step and strike.rank in (rank, -1)

    def _claim(self, number: int, strike: Strike, trainer: pl.Trainer) -> bool:
        who = trainer.global_rank if strike.rank == -1 else "one"
        try:
            (self._folder / f"died-{number}-{who}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _died(self) -> list[Path]:
        return list(self._folder.glob("died-*"))

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.wait(trainer)
        self.at("on_train_batch_start", trainer)

    def on_save_checkpoint(self, trainer: pl.Trainer, module: Any, checkpoint: Any) -> None:
        self.at("on_save_checkpoint", trainer)

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
        self.at("on_before_optimizer_step", trainer)


def _hook(name: str) -> Any:
    def hook(self: Strikes, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        self.at(name, trainer)

    return hook


for _name in ("train_start", "train_epoch_start", "train_batch_end", "train_epoch_end", "train_end", "after_backward"):
    setattr(Strikes, f"on_{_name}", _hook(f"on_{_name}"))
for _name in ("start", "batch_start", "end"):
    setattr(Strikes, f"on_validation_{_name}", _hook(f"on_validation_{_name}"))


class Net(pl.LightningModule):
    """A backbone and a head, by a script's settings."""

    def __init__(self, script: Script, strikes: Strikes | None) -> None:
        super().__init__()
        self.script, self.automatic_optimization = script, script.optimizer != "manual"
        vars(self)["strikes"] = strikes
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(4) if script.norm else nn.Identity()
        self.backbone = nn.Sequential(nn.Linear(3, 4), norm, nn.Dropout(0.2 if script.dropout else 0.0))
        self.extra = nn.Linear(3, 4)
        self.head = nn.Linear(4, 1)
        if script.unused:
            self.unused = nn.Linear(2, 2)
        self.register_buffer("offset", torch.zeros(1, dtype=torch.float64))
        if script.frozen:
            self.extra.requires_grad_(False)

    def configure_model(self) -> None:
        if self.script.strategy == "unicron_fsdp" and not isinstance(self.head.weight, DTensor):
            mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
            for part in (self.backbone, self.extra, self.head):
                fully_shard(part, mesh=mesh)

    def on_train_epoch_start(self) -> None:
        if self.script.frozen == "first":
            self.extra.requires_grad_(self.current_epoch > 0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.strikes is not None:
            self.strikes.at("forward", self.trainer)
        loss = self.loss(batch)
        if self.strikes is not None and loss.requires_grad:
            loss = _Backward.apply(loss, self)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        if self.automatic_optimization:
            return loss
        return self._by_hand(loss, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def loss(self, batch: Any) -> torch.Tensor:
        x = torch.cat([part[0] for part in batch.values()]) if isinstance(batch, dict) else batch[0]
        hidden = (self.backbone(x) + self.extra(x)).tanh()
        if self.script.buffer and self.training:
            self.offset = 0.9 * self.offset + 0.01 * x.mean()
        return (self.head(hidden) + self.offset - x.sum(1, keepdim=True).sin()).square().mean()

    def _by_hand(self, loss: torch.Tensor, batch_idx: int) -> torch.Tensor:
        one, other = self.optimizers()
        self.manual_backward(loss)
        one.step()
        one.zero_grad()
        if batch_idx % 2:
            other.step()
            other.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        script = self.script
        head, rest = list(self.head.parameters()), [p for n, p in self.named_parameters() if not n.startswith("head")]
        if not self.automatic_optimization:
            one = torch.optim.Adam(rest, lr=0.02, eps=1e-2)
            other = torch.optim.SGD(head, lr=0.05, momentum=0.9)
            return [one, other], ([] if not script.schedule else [torch.optim.lr_scheduler.StepLR(one, 2)])
        groups: Any = [{"params": [*rest, *head]}]
        if script.groups == 2:
            groups = [{"params": rest, "lr": 0.03}, {"params": head}]
        kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
        options: Any = {"momentum": 0.9} if script.optimizer == "sgd" else {"eps": 1e-2}
        optimizer = kinds[script.optimizer](groups, lr=0.05, **options)
        if not script.schedule:
            return optimizer
        if script.schedule == "plateau":
            schedule: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "loss"}}
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": script.schedule}}


class _Backward(torch.autograd.Function):
    """Passes a loss on, and strikes in its backward."""

    @staticmethod
    def forward(context: Any, loss: torch.Tensor, module: Net) -> torch.Tensor:
        context.module = module
        return loss.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        strikes = context.module.strikes
        strikes.at("backward", context.module.trainer)
        return gradients[0], None


def samples(number: int, seed: int) -> torch.Tensor:
    return torch.randn(number, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Stream(IterableDataset[Any]):
    """The samples, divided among the devices."""

    def __init__(self, number: int) -> None:
        self.x = samples(number, 2)

    def __iter__(self) -> Iterator[Any]:
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        return iter((row,) for row in self.x[rank::world])


class Budget:
    """A batch sampler with another number of batches in each epoch."""

    def __init__(self, number: int) -> None:
        self._number, self._epoch = number, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(self._number))
        random.Random(self._epoch).shuffle(order)
        size = 2 + self._epoch % 3
        return iter([order[start : start + size] for start in range(0, self._number, size)])


def data(script: Script) -> Any:
    """Return the training data: at least six steps of an epoch."""
    dataset = TensorDataset(samples(script.samples * script.workers // 2, 1))
    match script.data:
        case "stream":
            return DataLoader(Stream(len(dataset)), batch_size=2)
        case "both":
            return {"a": DataLoader(dataset, batch_size=2, shuffle=True), "b": DataLoader(Stream(10), batch_size=1)}
        case "budget":
            return DataLoader(dataset, batch_sampler=Budget(len(dataset)))  # type: ignore[arg-type]
    return DataLoader(dataset, batch_size=2, shuffle=True)


def callbacks_of(script: Script, folder: Path) -> list[pl.Callback]:
    made: dict[str, Any] = {
        "half_rates": HalfRates,
        "rate_at_start": RateAtStart,
        "scaled_weights": Scaled,
        "counting": Counted,
        "ema": lambda: EMAWeightAveraging(decay=0.9),
        "swa": lambda: StochasticWeightAveraging(0.03, swa_epoch_start=1, annealing_epochs=2),
        "stopping": lambda: EarlyStopping("val_loss", patience=1, min_delta=0.01),
    }
    found: list[pl.Callback] = [made[name]() for name in script.hooks]
    if script.accumulation == 0:
        found.append(GradientAccumulationScheduler({0: 1, 1: 2}))
    kinds: dict[str, Any] = {
        "model": lambda: ModelCheckpoint(
            folder / "saved", "{step}", every_n_train_steps=2, save_top_k=2, monitor="step"
        ),
        "folder": lambda: UnicronCheckpoint(folder / "saved", every_n_train_steps=2),
        "memory": lambda: MemoryCheckpoint(every_n_steps=2),
    }
    if script.saves:
        found.append(kinds[script.saves]())
    return found


class Scaled(ScaledWeights):
    """`ScaledWeights` for models of any kind."""

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        with torch.no_grad():
            module.head.weight.mul_(1.5)
            module.offset.add_(1)

    def on_train_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        with torch.no_grad():
            module.head.weight.mul_(0.9)


class Counted(pl.Callback):
    """Has state that its hooks change."""

    def __init__(self) -> None:
        self.started = 0

    def on_train_epoch_start(self, *_: Any) -> None:
        self.started += 1

    def state_dict(self) -> dict[str, Any]:
        return {"started": self.started}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.started = state["started"]


def trainer_of(script: Script, folder: Path, strikes: Strikes | None) -> pl.Trainer:
    own: list[pl.Callback] = [] if strikes is None else [strikes]
    validating: dict[str, dict[str, Any]] = {
        "": {"limit_val_batches": 0},
        "second": {"check_val_every_n_epoch": 2},
        "steps": {"val_check_interval": 2 * max(1, script.accumulation), "check_val_every_n_epoch": None},
    }
    if script.accumulation == 0:
        validating["steps"] = {}
    return pl.Trainer(
        strategy=UnicronFSDPStrategy(shard_size=1) if script.strategy == "unicron_fsdp" else "unicron",
        accelerator="cpu",
        devices=1,
        num_nodes=script.workers,
        precision="64-true",
        max_epochs=script.epochs,
        accumulate_grad_batches=max(1, script.accumulation),
        gradient_clip_val=script.clip or None,
        callbacks=[*callbacks_of(script, folder), *own],
        logger=CSVLogger(folder, "logs", version=0),
        log_every_n_steps=1,
        enable_checkpointing=script.saves in ("model", "folder"),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        **validating.get(script.validation, {}),
    )


def train(case: Case, folder: Path, *, alone: bool) -> dict[str, Any]:
    """Run the fits of a script; return what it has then, as plain data."""
    torch.set_num_threads(1)
    pl.seed_everything(3, verbose=False)
    script = case.script
    strikes = None if alone else Strikes(case, folder)
    module, trainer, fits = Net(script, strikes), None, []
    for number in range(1, script.fits + 1):
        if strikes is not None:
            strikes.fit = number
        if trainer is None or script.trainers > 1:
            trainer = trainer_of(script, folder / f"run{number}" if script.trainers > 1 else folder, strikes)
        else:
            trainer.fit_loop.max_epochs += script.epochs  # type: ignore[operator]
        validation = DataLoader(TensorDataset(samples(7, 9)), batch_size=2)
        trainer.fit(module, data(script), validation if script.validation else None)
        fits.append([trainer.global_step, trainer.current_epoch])
    assert trainer is not None
    return {
        "fits": fits,
        "module": {name: _plain(value) for name, value in module.state_dict().items()},
        "optimizers": [_state(optimizer) for optimizer in trainer.optimizers],
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "schedulers": [_numbers(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs],
        "counted": [each.started for each in trainer.callbacks if isinstance(each, Counted)],  # type: ignore[attr-defined]
    }


def _plain(value: torch.Tensor) -> Any:
    return (value.to_local() if isinstance(value, DTensor) else value).detach().tolist()


def _state(optimizer: torch.optim.Optimizer) -> Any:
    states = [optimizer.state.get(p, {}) for group in optimizer.param_groups for p in group["params"]]
    rates = [[group["lr"], group.get("momentum"), group.get("initial_lr")] for group in optimizer.param_groups]
    values = [{k: _plain(v) if isinstance(v, torch.Tensor) else v for k, v in each.items()} for each in states]
    return {"groups": rates, "state": values}


def _numbers(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if isinstance(value, int | float | list)}
