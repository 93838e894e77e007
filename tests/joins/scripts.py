"""Scripts whose hooks change the training, and in which a worker joins."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from unicron_lightning import UnicronFSDPStrategy
from unicron_lightning.callbacks import MemoryCheckpoint, UnicronCheckpoint


@dataclass(kw_only=True)
class Run:
    """One fit.

    Attributes:
        module: trained.
        data: of ``trainer.fit``.
        callbacks: of the trainer.
        trainer: its further settings; None: the trainer before.
        epochs: to train.
    """

    module: pl.LightningModule
    data: dict[str, Any] = field(default_factory=dict)
    callbacks: Sequence[pl.Callback] = ()
    trainer: dict[str, Any] | None = field(default_factory=dict)
    epochs: int = 3


@dataclass(frozen=True, kw_only=True)
class Script:
    """A script.

    Attributes:
        runs: returns its fits.
        kill: fit, step and rank of the worker that is killed before that step; rank None: all of them.
    """

    runs: Callable[[Path], list[Run]]
    kill: tuple[int, int, int | None] = (1, 7, 1)


def data(samples: int = 24, seed: int = 1) -> DataLoader[Any]:
    """Data of six steps."""
    x = torch.randn(samples, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=2)


class Net(pl.LightningModule):
    """A backbone and a head, with a buffer; two parameter groups."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 1)
        self.register_buffer("offset", torch.zeros(1, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return (self.head(self.backbone(x).tanh()) + self.offset - y).square().mean()

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.backbone.parameters(), "lr": 0.02}, {"params": self.head.parameters()}]
        optimizer = torch.optim.Adam(groups, lr=0.05, eps=1e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}


class NarrowMomentum(torch.optim.Optimizer):
    """Has states of another type than the parameters, one of them nested."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for each in group["params"]:
                state, gradient = self.state[each], each.grad.float()
                if not state:
                    state.update(momentum=torch.zeros_like(gradient), means=[torch.zeros_like(gradient)])
                state["momentum"].mul_(0.9).add_(gradient)
                state["means"][0].mul_(0.5).add_(gradient, alpha=0.5)
                each.sub_((state["momentum"] + state["means"][0]).double(), alpha=group["lr"])
        return loss


class Narrow(Net):
    def configure_optimizers(self) -> Any:
        return NarrowMomentum(self.parameters())


class HalfRates(pl.Callback):
    def on_train_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] *= 0.5


class RateAtStart(pl.Callback):
    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        trainer.optimizers[0].param_groups[0]["lr"] = 0.08


class ScaledWeights(pl.Callback):
    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        with torch.no_grad():
            module.head.weight.mul_(1.5)
            module.offset.add_(1)

    def on_train_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        with torch.no_grad():
            module.backbone[0].weight.mul_(0.9)
            module.backbone[1].running_mean.add_(0.5)


class Finetuned(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), lr=0.05, momentum=0.9)


class Unfreezing(pl.Callback):
    """Adds parameters and a group at the start of the second epoch; later it changes modes, a dropout and rates."""

    def setup(self, trainer: pl.Trainer, module: Any, stage: str) -> None:
        module.backbone.requires_grad_(False)

    def on_train_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        if trainer.current_epoch == 1:
            module.backbone.requires_grad_(True)
            trainer.optimizers[0].add_param_group({"params": module.backbone.parameters(), "lr": 0.01})

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        if trainer.global_step == 3:
            module.drop.p = 0.25
            module.backbone[1].momentum = 0.3
            trainer.limit_val_batches = 1


class Counting(pl.Callback):
    """Has state that its hooks change."""

    def __init__(self) -> None:
        self.started = 0
        self.seen = torch.zeros(2, dtype=torch.float64)

    def on_train_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        self.started += 1
        self.seen += 1
        for state in trainer.optimizers[0].state.values():
            if "exp_avg" in state:
                state["exp_avg"].mul_(0.5)
        trainer.lr_scheduler_configs[0].scheduler.last_epoch += 1

    def on_load_checkpoint(self, trainer: pl.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["callbacks"].clear()
        checkpoint["optimizer_states"][0]["param_groups"][0]["lr"] = 7.0

    def on_save_checkpoint(self, trainer: pl.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.seen.clone()

    def state_dict(self) -> dict[str, Any]:
        return {"started": self.started, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.started, self.seen = state["started"], state["seen"]


class Dropped(Finetuned):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)


class Manual(Net):
    """Two optimizers; one steps every other batch, so that gradients are kept between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        one, other = self.optimizers()
        loss = self.loss(batch)
        self.manual_backward(loss)
        one.step()
        one.zero_grad()
        if batch_idx % 2:
            other.step()
            other.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        one = torch.optim.Adam(self.backbone.parameters(), lr=0.02, eps=1e-3)
        other = torch.optim.SGD(self.head.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(one, 2)
        return [one, other], [schedule]


class Data(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def train_dataloader(self) -> Any:
        self.asked += 1
        return data()

    def val_dataloader(self) -> Any:
        return data(8, 2)

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.asked = state["asked"]


def hooked(*callbacks: Callable[[], pl.Callback], net: type[Net] = Net, **settings: Any) -> Callable[[Path], list[Run]]:
    """Return what makes one fit with these callbacks, and validations if the settings ask for some."""

    def runs(folder: Path) -> list[Run]:
        made = [make() for make in callbacks]
        given = {"train_dataloaders": data()}
        if "check_val_every_n_epoch" in settings or "val_check_interval" in settings:
            given["val_dataloaders"] = data(8, 2)
        return [Run(module=net(), data=given, callbacks=made, trainer=settings)]

    return runs


def saving(**options: Any) -> Callable[[Path], list[Run]]:
    """Return what makes a fit with Lightning's `ModelCheckpoint`."""

    def runs(folder: Path) -> list[Run]:
        saver = ModelCheckpoint(folder / "saved", **options)
        given = {"train_dataloaders": data(), "val_dataloaders": data(8, 2)}
        settings = {"check_val_every_n_epoch": 2, "enable_checkpointing": True}
        return [Run(module=Net(), data=given, callbacks=[saver], trainer=settings, epochs=4)]

    return runs


def with_data_module(folder: Path) -> list[Run]:
    settings = {"reload_dataloaders_every_n_epochs": 1}
    return [Run(module=Net(), data={"datamodule": Data()}, callbacks=[HalfRates()], trainer=settings)]


def twice(
    callback: Callable[[], pl.Callback], net: type[Net], *, same: bool, bare: bool = False, **settings: Any
) -> Callable[[Path], list[Run]]:
    """Return what makes two fits of a module, by one trainer or by two; the second fit may lack the callback."""

    def runs(folder: Path) -> list[Run]:
        module, made = net(), callback()
        given = {"train_dataloaders": data()}
        first = Run(module=module, data=given, callbacks=[made], trainer=settings)
        if same:
            return [first, Run(module=module, data=given, trainer=None)]
        return [first, Run(module=module, data=given, callbacks=[] if bare else [callback()])]

    return runs


def backbone() -> pl.Callback:
    return BackboneFinetuning(1, lambda epoch: 1.5, 0.3)


def averaging() -> pl.Callback:
    return StochasticWeightAveraging(0.03, swa_epoch_start=1, annealing_epochs=2)


class TrainsInValidation(pl.Callback):
    """Has a layer change its statistics in validations."""

    def on_validation_start(self, trainer: pl.Trainer, module: Any) -> None:
        module.backbone[1].train()


class Lambda(Net):
    """Has a schedule that takes no state of another kind."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)]


def averaged_again(folder: Path) -> list[Run]:
    """Two fits that average. The second one resumes within a data epoch: Lightning has no schedule until the next."""
    module, given = Lambda(), {"train_dataloaders": data()}
    saver = ModelCheckpoint(folder / "saved", "{step}", every_n_train_steps=9, save_top_k=-1)
    first = Run(
        module=module, data=given, callbacks=[averaging(), saver], trainer={"enable_checkpointing": True}, epochs=2
    )
    resumed = {**given, "ckpt_path": folder / "saved" / "step=9.ckpt", "weights_only": True}
    return [first, Run(module=module, data=resumed, callbacks=[averaging()], epochs=4)]


def sharded() -> UnicronFSDPStrategy:
    """Return a strategy whose replicas have one worker each."""
    return UnicronFSDPStrategy(shard_size=1)


class OptimizerState(pl.Callback):
    """Changes the optimizer's state when a data epoch begins."""

    def on_train_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        for state in trainer.optimizers[0].state.values():
            state["exp_avg"].mul_(0.5)
            state["step"] += 1


class Thawing(pl.Callback):
    """Has the module begin frozen in a first fit, and thaws it there."""

    def on_train_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        if trainer.current_epoch == 1 and not module.head.bias.requires_grad:
            module.head.requires_grad_(True)
            trainer.optimizers[0].add_param_group({"params": module.head.parameters()})


class Thawed(Net):
    """Begins with a frozen head, and gives the optimizer what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.head.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=0.05, momentum=0.9)


class Searched(Net):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 1e-3

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


def finder() -> pl.Callback:
    return LearningRateFinder(1e-4, 0.1, num_training_steps=20)


def validated_twice(folder: Path) -> list[Run]:
    """Two fits by one trainer; the second has not validated yet, and has the numbers of the first one's batches."""
    module, given = Net(), {"train_dataloaders": data(), "val_dataloaders": data(12, seed=2)}
    savers = [ModelCheckpoint(folder / "saved", every_n_train_steps=2, monitor="loss")]
    settings = {"check_val_every_n_epoch": 2, "num_sanity_val_steps": 0, "enable_checkpointing": True}
    first = Run(module=module, data=given, callbacks=savers, trainer=settings, epochs=2)
    return [first, Run(module=module, data=given, trainer=None, epochs=2)]


class OfRank(Net):
    """Begins with weights of its rank."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.head.weight.add_(int(os.environ.get("RANK", "0")))


def another_module(folder: Path) -> list[Run]:
    given = {"train_dataloaders": data()}
    return [Run(module=OfRank(), data=given, epochs=1), Run(module=OfRank(), data=given, trainer=None, epochs=2)]


class ByEpoch(pl.LightningDataModule):
    """Gives other data in each data epoch, as a curriculum does."""

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        return data(24, 10 + self.trainer.current_epoch)

    def val_dataloader(self) -> Any:
        assert self.trainer is not None
        return data(8, 20 + self.trainer.current_epoch)


def by_epoch(folder: Path) -> list[Run]:
    settings = {"reload_dataloaders_every_n_epochs": 2, "val_check_interval": 3}
    return [Run(module=Net(), data={"datamodule": ByEpoch()}, callbacks=[kept_in_memory()], trainer=settings, epochs=4)]


class Pictures(Net):
    """Has a convolution whose weight is in another order of memory; fused updates take gradients and states so, too."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)

    def loss(self, batch: Any) -> torch.Tensor:
        picture = torch.outer(batch[0].flatten(), batch[0].flatten()).reshape(1, 3, 2, -1).sin()
        return super().loss(batch) + self.convolution(picture).tanh().square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05, eps=1e-3, fused=True)


class CommonState(torch.optim.SGD):
    """Has state that parameters have in common."""

    def step(self, closure: Any = None) -> Any:
        shared = self.state["shared"]
        shared["steps"] = shared.get("steps", 0) + 1
        self.param_groups[0]["lr"] = 0.05 / shared["steps"]
        return super().step(closure)


class KeepsGradients(torch.optim.Optimizer):
    """Keeps the gradients of the step before, and no copies of them."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for each in group["params"]:
                before = self.state[each].get("before", each.grad)
                each.sub_(2 * each.grad - before, alpha=group["lr"])
                self.state[each]["before"] = each.grad
        return loss


class WithKeptGradients(Net):
    def configure_optimizers(self) -> Any:
        return KeepsGradients(self.parameters())


class WithCommonState(Net):
    def configure_optimizers(self) -> Any:
        return CommonState(self.parameters(), lr=0.05, momentum=0.9)


SCRIPTS = {
    "plain": Script(runs=hooked()),
    "half_rates": Script(runs=hooked(HalfRates)),
    "rate_at_start": Script(runs=hooked(RateAtStart, gradient_clip_val=0.4, gradient_clip_algorithm="value")),
    "scaled_weights": Script(runs=hooked(ScaledWeights)),
    "backbone": Script(runs=hooked(backbone, net=Finetuned)),
    "backbone_later": Script(runs=hooked(backbone, net=Finetuned), kill=(1, 12, 0)),
    "unfreezing": Script(runs=hooked(Unfreezing, net=Dropped, check_val_every_n_epoch=2)),
    "unfreezing_later": Script(runs=hooked(Unfreezing, net=Dropped), kill=(1, 12, 0)),
    "counting": Script(runs=hooked(Counting, ScaledWeights)),
    "manual": Script(runs=hooked(ScaledWeights, RateAtStart, net=Manual), kill=(1, 10, 1)),
    "norms_in_validation": Script(runs=hooked(TrainsInValidation, check_val_every_n_epoch=1), kill=(1, 13, 1)),
    "later_fit_before_its_validation": Script(runs=validated_twice, kill=(2, 14, 1)),
    "swa": Script(runs=hooked(averaging), kill=(1, 8, 1)),
    "swa_norms": Script(runs=hooked(averaging), kill=(1, 18, 1)),
    "swa_lambda": Script(runs=hooked(averaging, net=Lambda), kill=(1, 8, 0)),
    "swa_lambda_later": Script(runs=hooked(averaging, net=Lambda), kill=(1, 18, 0)),
    "swa_second_fit": Script(runs=twice(averaging, Net, same=True), kill=(2, 21, 1)),
    "swa_second_fit_norms": Script(runs=twice(averaging, Net, same=True), kill=(2, 30, 0)),
    "ema": Script(runs=hooked(EMAWeightAveraging, check_val_every_n_epoch=1)),
    "early_stopping": Script(runs=hooked(lambda: EarlyStopping("val_loss"), val_check_interval=3)),
    "timer": Script(runs=hooked(lambda: Timer("00:01:00:00"))),
    "data_module": Script(runs=with_data_module),
    "saved": Script(runs=saving(monitor="loss", every_n_train_steps=2, save_top_k=-1), kill=(1, 13, 0)),
    "saved_last": Script(runs=saving(monitor="val_loss", save_last=True), kill=(1, 13, 1)),
    "sharded": Script(runs=hooked(ScaledWeights, HalfRates, OptimizerState, strategy=sharded)),
    "narrow_state": Script(runs=hooked(HalfRates, net=Narrow)),
    "sharded_narrow_state": Script(runs=hooked(HalfRates, net=Narrow, strategy=sharded)),
    "sharded_unfreezing": Script(runs=hooked(Unfreezing, net=Dropped, strategy=sharded), kill=(1, 12, 0)),
    "sharded_twice": Script(runs=twice(ScaledWeights, Net, same=True, strategy=sharded), kill=(2, 21, 0)),
    "second_fit": Script(runs=twice(HalfRates, Net, same=False), kill=(2, 7, 1)),
    "second_fit_same": Script(runs=twice(ScaledWeights, Net, same=True), kill=(2, 21, 1)),
    "second_fit_thawed": Script(runs=twice(Thawing, Thawed, same=False), kill=(2, 3, 1)),
    "second_fit_searched": Script(runs=twice(finder, Searched, same=False, bare=True), kill=(2, 3, 0)),
    "second_fit_of_another_module": Script(runs=another_module, kill=(2, 9, 1)),
    "data_by_epoch": Script(runs=by_epoch, kill=(1, 20, 1)),
    "channels_last": Script(runs=hooked(net=Pictures)),
    "kept_gradients": Script(runs=hooked(net=WithKeptGradients)),
    "common_state": Script(runs=hooked(net=WithCommonState)),
    "second_fit_backbone": Script(runs=twice(backbone, Finetuned, same=True), kill=(1, 14, 1)),
}
RESUMED = {
    "swa_resumed": Script(runs=averaged_again, kill=(2, 10, 1)),
    "swa_resumed_later": Script(runs=averaged_again, kill=(2, 14, 1)),
}
"""Fits with a ``ckpt_path``; a joiner has not read it."""


def saved_twice(*, same: bool, **settings: Any) -> Callable[[Path], list[Run]]:
    """Return a script's two fits that save; the second has fewer steps."""

    def runs(folder: Path) -> list[Run]:
        module = Net()
        savers = [ModelCheckpoint(folder / f"fit{number}", every_n_train_steps=3) for number in range(2)]
        given = {"train_dataloaders": data()}
        settings_ = {"enable_checkpointing": True} | settings
        first = Run(module=module, data=given, callbacks=[savers[0]], trainer=settings_)
        if same:
            return [first, Run(module=module, data=given, trainer=None, epochs=2)]
        return [first, Run(module=module, data=given, callbacks=[savers[1]], trainer=settings_, epochs=2)]

    return runs


class Parser:
    """Saves a configuration, as that of `LightningCLI` does."""

    def save(self, config: str, path: str, *, overwrite: bool, **_: Any) -> None:
        if Path(path).exists() and not overwrite:
            raise FileExistsError(path)
        Path(path).write_text(config)


def configured(folder: Path) -> list[Run]:
    saving_ = [ModelCheckpoint(folder / "saved", every_n_train_steps=3), SaveConfigCallback(Parser(), "rate: 0.05")]
    settings = {"enable_checkpointing": True, "logger": CSVLogger(folder, "logs", "fixed")}
    return [Run(module=Net(), data={"train_dataloaders": data()}, callbacks=saving_, trainer=settings)]


def kept_in_memory() -> pl.Callback:
    return MemoryCheckpoint(every_n_steps=2)


class OwnSchedule(torch.optim.lr_scheduler.StepLR):
    """Keeps attributes of its rank when it takes another one's state."""

    def __init__(self, optimizer: Any) -> None:
        self.started, self.place = time.monotonic(), f"/tmp/{os.getpid()}"
        super().__init__(optimizer, 4)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({**state, "started": self.started, "place": self.place})


class OwnScheduled(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        return [optimizer], [OwnSchedule(optimizer)]


class Odd(pl.Callback):
    """Changes a parameter on the first joiner only, as code may whose state no state_dict has."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        if (self._folder / "killed").exists() and trainer.global_rank == 1 and not (self._folder / "odd").exists():
            (self._folder / "odd").touch()
            with torch.no_grad():
                module.head.weight.mul_(2)


def odd(folder: Path) -> list[Run]:
    return [Run(module=Net(), data={"train_dataloaders": data()}, callbacks=[Odd(folder)])]


class Metric(Net):
    """Follows metrics with its rate, the mean loss of each epoch or the last validation's."""

    monitor, interval = "loss", "epoch"

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.9, patience=0, threshold=0.5)
        settings = {"scheduler": schedule, "monitor": self.monitor, "interval": self.interval}
        return {"optimizer": optimizer, "lr_scheduler": settings}


class Validated(Metric):
    monitor = "val_loss"


class Stepped(Metric):
    interval = "step"


class AtEnds(pl.Callback):
    """Changes the weights where a run and its data epochs begin and end."""

    def on_fit_start(self, trainer: pl.Trainer, module: Any) -> None:
        self._scale(module, 1.1)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._scale(module, 0.95)

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        if not trainer.sanity_checking:
            self._scale(module, 1.02)

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._scale(module, 0.5)

    def _scale(self, module: Any, by: float) -> None:
        with torch.no_grad():
            module.head.weight.mul_(by)


class DyingAt(pl.Callback):
    """Kills all workers of the first life in a hook, at a step."""

    def __init__(self, folder: Path, hook: str, step: int) -> None:
        self._killed, self._folder, self._step = folder / "killed", folder, step
        setattr(self, hook, self._die)

    def _die(self, trainer: pl.Trainer, *_: Any) -> None:
        here = self._folder / f"ends-{trainer.global_rank}"
        if self._killed.exists() or trainer.global_step < self._step or trainer.num_nodes < 2:
            return
        here.touch()
        while len(list(self._folder.glob("ends-*"))) < trainer.world_size:
            time.sleep(0.001)
        self._killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)


class DyingUnheard(DyingAt):
    """Kills all workers of the first life when a checkpoint is complete, and before it is reported."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "on_train_batch_start", 7)

    def on_fit_start(self, trainer: pl.Trainer, module: Any) -> None:
        if not self._killed.exists() and trainer.num_nodes == 2:
            reported: Any = trainer.strategy.reported  # type: ignore[attr-defined]
            reported.written = partial(self._unheard, trainer)

    def _unheard(self, trainer: pl.Trainer, *_: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            self._die(trainer)
        (self._folder / "complete").touch()
        threading.Event().wait()

    def _die(self, trainer: pl.Trainer, *where: Any) -> None:
        first = trainer.num_nodes == 2 and not self._killed.exists()
        while where and first and trainer.global_step >= self._step and not (self._folder / "complete").exists():
            time.sleep(0.001)
        self._step = 0 if not where else self._step
        super()._die(trainer)


def resumed(
    *hooks: Callable[[], pl.Callback],
    net: type[Net] = Net,
    kind: type[ModelCheckpoint] = ModelCheckpoint,
    dies: tuple[()] | tuple[str, int] | None = None,
    validates: bool = False,
    strategy: Any = None,
    **options: Any,
) -> Callable[[Path], list[Run]]:
    """Return what makes a fit with hooks that change the state, and a checkpoint on disk."""

    def runs(folder: Path) -> list[Run]:
        given: dict[str, Any] = {"train_dataloaders": data()}
        if validates:
            given["val_dataloaders"] = data(8, 2)
        made = [make() for make in hooks]
        made.append(kind(folder / "saved", **options))
        if dies is not None:
            made.append(DyingAt(folder, *dies) if dies else DyingUnheard(folder))
        settings: dict[str, Any] = {"enable_checkpointing": True, "num_sanity_val_steps": 1}
        settings |= {"logger": CSVLogger(folder, "logs"), "log_every_n_steps": 1}
        if validates:
            settings["val_check_interval"] = 3
        if strategy is not None:
            settings["strategy"] = strategy
        return [Run(module=net(), data=given, callbacks=made, trainer=settings)]

    return runs


ODD: dict[str, Script] = {"odd": Script(runs=odd), "own_schedule": Script(runs=hooked(net=OwnScheduled))}
ALL = (HalfRates, RateAtStart, ScaledWeights, AtEnds)
NEVER = (9, 0, None)
LOST: dict[str, Script] = {
    "lost_with_memory": Script(runs=hooked(kept_in_memory, HalfRates, ScaledWeights, Counting), kill=(1, 9, None)),
    "lost_with_memory_sharded": Script(
        runs=hooked(kept_in_memory, HalfRates, ScaledWeights, strategy=sharded), kill=(1, 9, None)
    ),
    "lost_with_memory_and_data_by_epoch": Script(runs=by_epoch, kill=(1, 20, None)),
    "lost_with_a_configuration": Script(runs=configured, kill=(1, 8, None)),
    "lost_in_second_fit": Script(runs=saved_twice(same=False), kill=(2, 8, None)),
    "lost_in_second_fit_same": Script(runs=saved_twice(same=True), kill=(2, 26, None)),
    "lost_in_second_fit_sharded": Script(runs=saved_twice(same=True, strategy=sharded), kill=(2, 26, None)),
    "lost_at_the_begin_of_the_second_fit": Script(runs=saved_twice(same=False), kill=(2, 1, None)),
    "lost_within_epoch": Script(runs=resumed(*ALL, every_n_train_steps=2, validates=True), kill=(1, 9, None)),
    "lost_after_last_step": Script(runs=resumed(*ALL, every_n_train_steps=6, validates=True), kill=(1, 8, None)),
    "lost_after_last_step_stopped": Script(
        runs=resumed(*ALL, every_n_train_steps=18, validates=True, dies=("on_train_end", 18)), kill=NEVER
    ),
    "lost_after_epoch": Script(runs=resumed(*ALL, net=Metric), kill=(1, 8, None)),
    "lost_after_validation": Script(runs=resumed(*ALL, net=Validated, validates=True), kill=(1, 14, None)),
    "lost_with_step_metric": Script(runs=resumed(*ALL, net=Stepped, every_n_train_steps=2), kill=(1, 9, None)),
    "lost_at_the_end": Script(runs=resumed(*ALL, dies=("on_train_end", 18)), kill=NEVER),
    "lost_at_the_very_end": Script(runs=resumed(*ALL, every_n_train_steps=6, dies=("on_fit_end", 18)), kill=NEVER),
    "lost_with_unheard_file": Script(runs=resumed(*ALL, every_n_train_steps=4, dies=()), kill=NEVER),
    "lost_with_unheard_folder": Script(
        runs=resumed(*ALL, kind=UnicronCheckpoint, every_n_train_steps=6, validates=True, dies=()), kill=NEVER
    ),
    "lost_with_manual": Script(runs=resumed(*ALL, net=Manual, every_n_train_steps=3), kill=(1, 11, None)),
    "lost_with_swa": Script(runs=resumed(averaging, AtEnds, every_n_train_steps=4), kill=(1, 9, None)),
    "lost_with_ema": Script(runs=resumed(EMAWeightAveraging, AtEnds, every_n_train_steps=4), kill=(1, 9, None)),
    "lost_with_backbone": Script(runs=resumed(backbone, net=Finetuned, every_n_train_steps=4), kill=(1, 9, None)),
    "lost_with_sharded_file": Script(
        runs=resumed(HalfRates, ScaledWeights, OptimizerState, AtEnds, strategy=sharded), kill=(1, 8, None)
    ),
    "lost_with_unheard_sharded_file": Script(
        runs=resumed(HalfRates, ScaledWeights, AtEnds, strategy=sharded, every_n_train_steps=4, dies=()), kill=NEVER
    ),
    "lost_with_unheard_sharded_folder": Script(
        runs=resumed(
            HalfRates, ScaledWeights, AtEnds, strategy=sharded, kind=UnicronCheckpoint, every_n_train_steps=6, dies=()
        ),
        kill=NEVER,
    ),
}
"""Scripts all of whose workers are killed at once: a new life resumes from a checkpoint."""
