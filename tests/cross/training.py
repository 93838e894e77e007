"""Trains the script of a case, in a world with its deaths, or alone without any."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from cross.cases import Case, Script
from cross.model import Net, data, samples
from cross.striking import Strikes
from joins.scripts import HalfRates, RateAtStart, ScaledWeights
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, TensorDataset

from unicron_lightning import UnicronFSDPStrategy, UnicronStrategy
from unicron_lightning.callbacks import MemoryCheckpoint, UnicronCheckpoint

OLD = "old.ckpt"
"""The checkpoint of another run, in a case's folder."""


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


class Stop(pl.Callback):
    """Ends a fit within an epoch."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 8:
            trainer.should_stop = True


class Old(pl.Callback):
    """Saves a checkpoint at the end of a fit."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        trainer.save_checkpoint(self._folder / OLD)


def callbacks_of(script: Script, folder: Path, *, plain: bool) -> list[pl.Callback]:
    made: dict[str, Any] = {
        "half_rates": HalfRates,
        "rate_at_start": RateAtStart,
        "scaled_weights": Scaled,
        "counting": Counted,
        "ema": lambda: EMAWeightAveraging(decay=0.9),
        "swa": lambda: StochasticWeightAveraging(0.03, swa_epoch_start=1, annealing_epochs=2),
        "stopping": lambda: EarlyStopping("val_loss", patience=1, min_delta=0.01),
        "stop": Stop,
    }
    found: list[pl.Callback] = [made[name]() for name in script.hooks]
    if script.accumulation == 0:
        times = script.devices if plain else 1
        found.append(GradientAccumulationScheduler({0: times, 1: 2 * times}))
    kinds: dict[str, Any] = {
        "model": lambda: ModelCheckpoint(
            folder / "saved", "{step}", every_n_train_steps=2, save_top_k=2, monitor="step"
        ),
        "folder": lambda: UnicronCheckpoint(folder / "saved", every_n_train_steps=2),
        "memory": lambda: MemoryCheckpoint(every_n_steps=2),
    }
    if script.saves and not plain:
        found.append(kinds[script.saves]())
    return found


def _strategy(script: Script, *, plain: bool, alone: bool) -> Any:
    if plain:
        return "auto"
    if script.strategy == "unicron_megatron":
        from cross.megatron import strategy_of  # patches torch

        return strategy_of(script, alone=alone)
    common: dict[str, Any] = {"reproducible": script.reproducible, "witness_every": witness_of(script, alone=alone)}
    if script.strategy == "unicron":
        return UnicronStrategy(**common)
    width = 1 if alone else script.shard_size
    sizes = {"tensor_parallel_size" if script.layout == "tensor" else "shard_size": width}
    return UnicronFSDPStrategy(**sizes, **common)


def witness_of(script: Script, *, alone: bool) -> int | None:
    """Return the number of steps between two that are compared."""
    return 1 if script.witness and not alone else None


def trainer_of(script: Script, folder: Path, strikes: Strikes | None, *, plain: bool) -> pl.Trainer:
    own: list[pl.Callback] = [] if strikes is None else [strikes]
    validating: dict[str, dict[str, Any]] = {
        "": {"limit_val_batches": 0},
        "second": {"check_val_every_n_epoch": 2},
        "steps": {"val_check_interval": 2 * max(1, script.accumulation), "check_val_every_n_epoch": None},
    }
    if script.accumulation == 0:
        validating["steps"] = {}
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)  # type: ignore[attr-defined]
    alone, megatron = strikes is None, script.strategy == "unicron_megatron"
    mixed = [MixedPrecision("16-mixed", "cpu", scaler)]
    return pl.Trainer(
        strategy=_strategy(script, plain=plain, alone=alone),
        accelerator="cpu",
        devices=1,
        num_nodes=1 if plain else script.devices if alone else script.workers,
        precision="bf16-mixed" if script.mixed else None if script.scaler or megatron else "64-true",
        plugins=mixed if script.scaler else None,  # type: ignore[arg-type]
        max_epochs=script.epochs,
        max_steps=script.most_steps or -1,
        limit_train_batches=script.limit * (script.devices if plain else 1) or 1.0,
        reload_dataloaders_every_n_epochs=int(script.reload),
        accumulate_grad_batches=max(1, script.accumulation) * (script.devices if plain and script.accumulation else 1),
        gradient_clip_val=None if megatron else script.clip or None,
        callbacks=[*callbacks_of(script, folder, plain=plain), *own],
        logger=CSVLogger(folder, "logs", version=0),
        log_every_n_steps=1,
        enable_checkpointing=script.saves in ("model", "folder") and not plain,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        **validating.get(script.validation, {}),
    )


def _prepare() -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # of logged values, too
    pl.seed_everything(3, verbose=False)


def module_of(script: Script, strikes: Strikes | None, *, plain: bool) -> pl.LightningModule:
    """Return the model of a script."""
    if script.strategy != "unicron_megatron":
        net = Net(script, strikes, plain=plain)
        return net.float() if script.mixed else net.double()
    from cross.megatron import Stage  # patches torch

    return Stage(script, strikes)


def save_old(case: Case, folder: Path) -> None:
    """Save the checkpoint of another run: of one epoch, without deaths."""
    _prepare()
    module = module_of(case.script, None, plain=case.plain)
    trainer = trainer_of(case.script, folder / "former", None, plain=case.plain)
    trainer.fit_loop.max_epochs = 1
    trainer.callbacks.append(Old(folder))  # type: ignore[attr-defined]
    trainer.fit(module, data(case.script, plain=case.plain), _validation(case.script))


class Data(pl.LightningDataModule):
    """Gives the data again when it is asked for them."""

    def __init__(self, script: Script, *, plain: bool) -> None:
        super().__init__()
        self._script, self._plain = script, plain

    def train_dataloader(self) -> Any:
        return data(self._script, plain=self._plain)

    def val_dataloader(self) -> Any:
        return _validation(self._script) or []


def _fit(trainer: pl.Trainer, module: pl.LightningModule, script: Script, old: Path | None, *, plain: bool) -> None:
    if script.reload:
        trainer.fit(module, datamodule=Data(script, plain=plain), ckpt_path=old)
    else:
        trainer.fit(module, data(script, plain=plain), _validation(script), ckpt_path=old)


def _validation(script: Script) -> Any:
    # Workers that share experts have batches of one size.
    whole = {"batch_size": 2, "drop_last": script.experts}
    return DataLoader(TensorDataset(samples(7, 9)), **whole) if script.validation else None  # type: ignore[arg-type]


def train(case: Case, folder: Path, *, alone: bool) -> dict[str, Any]:
    """Run the fits of a script; return what it has then, as plain data."""
    _prepare()
    script, plain = case.script, case.plain and alone
    strikes = None if alone else Strikes(case, folder)
    module, trainer, fits = module_of(script, strikes, plain=plain), None, []
    for number in range(1, script.fits + 1):
        if strikes is not None:
            strikes.fit = number
        if trainer is None or script.trainers > 1:
            own = folder / f"run{number}" if script.trainers > 1 else folder
            trainer = trainer_of(script, own, strikes, plain=plain)
        else:
            trainer.fit_loop.max_epochs += script.epochs  # type: ignore[operator]
        resumes = (script.resumes and number == 1) or (script.returns and number == script.fits)
        _fit(trainer, module, script, (folder.parent if alone else folder) / OLD if resumes else None, plain=plain)
        fits.append([trainer.global_step, trainer.current_epoch])
    assert trainer is not None
    found: Any = None
    if script.after:
        if strikes is not None:
            strikes.fit = script.fits + 1
        found = trainer.validate(module, _validation(script), verbose=False)
    if strikes is not None:
        strikes.end()
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return {
        **_tensors(trainer, module),
        "fits": fits,
        "validated": found,
        "schedulers": [_schedule(script, config.scheduler) for config in trainer.lr_scheduler_configs],
        "counted": [each.started for each in trainer.callbacks if isinstance(each, Counted)],  # type: ignore[attr-defined]
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items() if name != "loss_step"},
        "scaler": None if scaler is None else _numbers(scaler.state_dict()),
    }


def _tensors(trainer: pl.Trainer, module: Any) -> dict[str, Any]:
    if module.script.strategy == "unicron_megatron":
        from cross.megatron import state  # patches torch

        return state(trainer, module)
    sharded = getattr(trainer.strategy, "_sharded", None)
    return {
        "spare": sharded is not None and sharded.holder.is_spare,
        "module": {name: _plain(value) for name, value in module.state_dict().items()},
        "optimizers": [_state(optimizer) for optimizer in trainer.optimizers],
    }


def written(folder: Path, other: Path | None = None, *, leftovers: bool = True) -> dict[str, Any]:
    """Return what a run has left on disk: the rows of its logs, and the names of its checkpoints.

    Args:
        folder: of the run.
        other: of another run within it, which does not count.
        leftovers: whether folders of unfinished versions count, which a later version removes after an hour.
    """
    rows: dict[str, Any] = {}
    paths = [
        path for path in folder.glob("**/*") if other not in path.parents and folder / "former" not in path.parents
    ]
    for path in [each for each in sorted(paths) if each.name == "metrics.csv"]:
        with path.open() as lines:
            rows[str(path.relative_to(folder))] = [_row(row) for row in csv.DictReader(lines)]
    return {
        "rows": rows,
        "kept": sorted(
            str(path.relative_to(folder))
            for path in paths
            if path.parent.name == "saved" and not path.name.startswith(("last-pause-", "relayout-"))
            if leftovers or path.suffix != ".unfinished"
        ),
    }


def _row(row: dict[str, str]) -> dict[str, float]:
    return {name: float(value) for name, value in row.items() if value}


def _plain(value: torch.Tensor) -> Any:
    if not isinstance(value, DTensor):
        return value.detach().tolist()
    local = value.to_local().detach()
    if local.shape == value.shape:
        return local.tolist()
    # as `torch.distributed.checkpoint` asks for a worker's part
    [part] = value.__create_chunk_list__()  # type: ignore[attr-defined]
    return {"at": list(part.offsets), "of": list(local.shape), "local": local.tolist()}


def _state(optimizer: torch.optim.Optimizer) -> Any:
    states = [optimizer.state.get(p, {}) for group in optimizer.param_groups for p in group["params"]]
    rates = [[group["lr"], group.get("momentum"), group.get("initial_lr")] for group in optimizer.param_groups]
    values = [tree_map(lambda v: _plain(v) if isinstance(v, torch.Tensor) else v, dict(each)) for each in states]
    return {"groups": rates, "state": values}


def _schedule(script: Script, scheduler: Any) -> dict[str, Any]:
    """Return a scheduler's state; Megatron has more groups of parameters with experts on several workers."""
    numbers = _numbers(scheduler.state_dict())
    return {k: sorted(set(v)) if script.experts and isinstance(v, list) else v for k, v in numbers.items()}


def _numbers(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if isinstance(value, int | float | list)}
