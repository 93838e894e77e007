"""Scenarios: what a checkpoint of any kind restores is what was saved, bit by bit; in one process."""

from __future__ import annotations

import copy
import gc
import weakref
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from unicron_lightning import UnicronFSDPStrategy, UnicronStrategy, wire
from unicron_lightning.callbacks import UnicronCheckpoint
from unicron_lightning.checkpoints.files import digest_of
from unicron_lightning.fsdp.mesh import local_shard
from unicron_lightning.strategies import membership
from unicron_lightning.strategies.state import join_state
from unicron_lightning.worker import codec

SAVED = 4
WAYS = ("ckpt_path", "itself")
GROUPS = (1, 2)


class Network(nn.Module):
    """With a tied head, and parameters that are frozen, frozen at first, and not used."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.inner, self.late = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.head, self.unused = nn.Linear(4, 5, bias=False), nn.Linear(2, 2)
        self.head.weight = self.tokens.weight
        self.inner.bias.requires_grad_(False)
        self.late.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.late(self.inner(self.tokens(tokens))))
        return logits


class Module(pl.LightningModule):
    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups, self.found = groups, dict[str, Any]()
        self.net = Network()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[0].roll(1))

    def on_train_start(self) -> None:
        if self.global_step:
            self.found = self.state()

    def state(self) -> dict[str, Any]:
        """Return a copy of the tensors and settings of the run."""
        return state_of(self.trainer)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == SAVED // 2:
            self.net.late.requires_grad_(True)

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        cut = [parameters] if self.groups == 1 else [parameters[2:], parameters[:2]]
        groups = [{"params": each, "weight_decay": 0.1 * number} for number, each in enumerate(cut)]
        optimizer = torch.optim.AdamW(groups, lr=0.1, amsgrad=True)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def state_of(trainer: pl.Trainer) -> dict[str, Any]:
    module, [optimizer], [schedule] = trainer.lightning_module, trainer.optimizers, trainer.lr_scheduler_configs
    tensors = {name: local_shard(each.detach()) for name, each in module.state_dict(keep_vars=True).items()}
    names = {id(each): name for name, each in module.named_parameters()}
    for parameter, values in optimizer.state.items():
        tensors |= {f"{names[id(parameter)]} {key}": local_shard(value) for key, value in values.items()}
    groups = [{**group, "params": [names[id(each)] for each in group["params"]]} for group in optimizer.param_groups]
    return copy.deepcopy({"tensors": tensors, "groups": groups, "schedule": schedule.scheduler.state_dict()})


class Saved(pl.Callback):
    """Keeps the state at a checkpoint, and a joiner's."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        self.given = b""

    def on_save_checkpoint(self, trainer: pl.Trainer, *others: Any) -> None:
        self.state = trainer.lightning_module.state()


class Parts(Saved):
    """Saves as at a pause, or before another layout, and keeps the state of that moment."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *others: Any) -> None:
        strategy: Any = trainer.strategy
        if trainer.global_step == SAVED:
            membership.save_whole(strategy, strategy._membership.state(trainer), self.path)
            self.state = trainer.lightning_module.state()


class Resumes(pl.Callback):
    """Gives a run a checkpoint of its task, as a new life's."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        known = wire.Checkpoint(path=self.path, step=SAVED, digest=digest_of(self.path), life=1)
        trainer.strategy.session.resume = (known,)  # type: ignore[attr-defined]


def fitted(
    strategy: Any,
    module: pl.LightningModule,
    steps: int,
    *callbacks: pl.Callback,
    resume: Path | None = None,
    precision: Any = None,
) -> pl.Trainer:
    pl.seed_everything(2, verbose=False)
    shown: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        precision=precision,
        callbacks=list(callbacks),
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in callbacks),
        **shown,
    )
    data = DataLoader(TensorDataset(torch.arange(40) % 5), batch_size=4)
    trainer.fit(module, data, ckpt_path=resume, weights_only=True)
    return trainer


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["tensors"].keys() == expected["tensors"].keys()
    for name, value in found["tensors"].items():
        assert value.dtype == expected["tensors"][name].dtype and torch.equal(value, expected["tensors"][name]), name
    assert found["groups"] == expected["groups"] and found["schedule"] == expected["schedule"]


def strategy_of(name: str, form: str) -> Any:
    if name == "unicron":
        return UnicronStrategy()
    return UnicronFSDPStrategy(shard_size=1, blocks=("Network",), save_distributed_checkpoint="folder" in form)


def checkpoints(rank: int, world: int, folder: Path, strategy: str, form: str) -> None:
    """A checkpoint of a form, from `ckpt_path` and as that of an earlier life, with one and two groups."""
    for way, groups in product(WAYS, GROUPS):
        checkpoint(folder / f"{way}{groups}", strategy, form, way, groups)


def checkpoint(folder: Path, strategy: str, form: str, way: str, groups: int) -> None:
    path = folder / f"step={SAVED}.ckpt"
    saver: type[ModelCheckpoint] = UnicronCheckpoint if form == "beside" else ModelCheckpoint
    parts = form.startswith("parting")
    saved = Parts(path) if parts else Saved()
    writes = [] if parts else [saver(folder, "{step}", every_n_train_steps=SAVED)]
    fitted(strategy_of(strategy, form), Module(groups), SAVED, saved, *writes)
    assert path.is_dir() == (form not in ("file", "parting"))
    assert any(name.startswith("net.late.weight ") for name in saved.state["tensors"])
    again = Module(groups)
    itself = [Resumes(path)] if way == "itself" else []
    fitted(strategy_of(strategy, form), again, SAVED + 1, *itself, resume=None if itself else path)
    same(again.found, saved.state)


class Gives(pl.Callback):
    """Encodes the state for a joiner at a step boundary, or takes it."""

    def __init__(self, data: bytes = b"") -> None:
        self.data, self.state = data, dict[str, Any]()

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        strategy: Any = trainer.strategy
        if self.data:
            state = codec.decode(self.data)
            join_state.receive(trainer, state["whole"])
            if state["shard"]:
                strategy.parallelism.member.model.load_state(state["shard"])
            pl_module.found = pl_module.state()

    def on_train_batch_end(self, trainer: pl.Trainer, *others: Any) -> None:
        strategy: Any = trainer.strategy
        if trainer.global_step == SAVED and not self.data:
            holder = getattr(strategy.parallelism, "_holder", None)
            shard = {} if holder is None else holder.member.model.plain_state()
            self.data = codec.encode({"whole": strategy._membership.state(trainer), "shard": shard})
            self.state = trainer.lightning_module.state()


def members(rank: int, world: int, folder: Path, strategy: str) -> None:
    """The state of a member, which is that in memory, too."""
    for groups in GROUPS:
        member(strategy, groups)


def member(strategy: str, groups: int) -> None:
    gives = Gives()
    fitted(strategy_of(strategy, ""), Module(groups), SAVED, gives)
    again = Module(groups)
    fitted(strategy_of(strategy, ""), again, SAVED + 1, Gives(gives.data))
    same(again.found, gives.state)


def double(rank: int, world: int, folder: Path, strategy: str) -> None:
    """A file of float64 parameters."""
    saved, writes = Saved(), ModelCheckpoint(folder, "{step}", every_n_train_steps=SAVED)
    fitted(strategy_of(strategy, ""), Module(2), SAVED, saved, writes, precision="64-true")
    again = Module(2)
    path = folder / f"step={SAVED}.ckpt"
    fitted(strategy_of(strategy, ""), again, SAVED + 1, resume=path, precision="64-true")
    same(again.found, saved.state)


def dropped(rank: int, world: int, folder: Path, strategy: str) -> None:
    """A trainer that the script drops is not kept."""
    known = weakref.ref(fitted(strategy_of(strategy, ""), Module(1), 1))
    gc.collect()
    assert known() is None
