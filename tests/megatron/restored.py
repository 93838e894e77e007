"""Scenarios: what a checkpoint of any kind restores is what was saved, with each of Megatron's optimizers."""

from __future__ import annotations

import copy
import gc
import os
from itertools import product
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from fsdp.restored import SAVED, WAYS, Parts, Resumes, Saved, fitted, same
from lightning.pytorch.callbacks import ModelCheckpoint
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from torch import Tensor

from unicron_lightning.callbacks import UnicronCheckpoint
from unicron_lightning.errors import ConfigError
from unicron_lightning.megatron import shim, toy
from unicron_lightning.replica.mirror import Redundancy
from unicron_lightning.strategies.megatron.strategy import UnicronMegatronStrategy
from unicron_lightning.strategies.state import join_state
from unicron_lightning.worker import codec

if TYPE_CHECKING:
    from pathlib import Path

LENGTH = 8
KINDS = {
    "float32": {},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True},
    "divided": {"zero": True},
    "divided fp16": {"zero": True, "fp16": True},
    "divided in buckets": {"zero": True, "buckets": True},
    "untied in buckets": {"buckets": True, "tied": False},
}
"""Of optimizers, by what differs from plain AdamW."""


class Module(pl.LightningModule):
    """A GPT with weights that decay and others that do not, a frozen one, and tokens that are not used."""

    def __init__(
        self, *, bf16: bool = False, fp16: bool = False, tied: bool = True, zero: bool = False, buckets: bool = False
    ) -> None:
        super().__init__()
        self.options = toy.Toy(layers=2, hidden=24, length=LENGTH, bf16=bf16, fp16=fp16, tied=tied)
        self.zero, self.buckets, self.found = zero, buckets, dict[str, Any]()
        self.rate = 0.05

    def configure_model(self) -> None:
        self.model = toy.model(self.options, toy.config(self.options))
        dict(self.model.named_parameters())[self.frozen].requires_grad_(False)

    @property
    def frozen(self) -> str:
        return next(name for name, _ in self.model.named_parameters() if name.endswith("decoder.final_layernorm.bias"))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens = (batch[0][:, None] + torch.arange(LENGTH)) % 50
        return self.model(tokens, torch.arange(LENGTH).expand_as(tokens), None)

    predict_step = training_step

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        labels = (batch[0][:, None] + torch.arange(LENGTH) + 1) % 50
        return torch.nn.functional.cross_entropy(output.float().flatten(0, 1), labels.flatten())

    def on_train_start(self) -> None:
        if self.global_step:
            self.found = self.state()

    def configure_optimizers(self) -> Any:
        config = OptimizerConfig(
            optimizer="adam",
            lr=self.rate,
            weight_decay=0.1,
            bf16=self.options.bf16,
            fp16=self.options.fp16,
            initial_loss_scale=2.0**10,
            loss_scale_window=1,  # another scale in each step
            use_distributed_optimizer=self.zero,
        )
        return {
            "optimizer": config,
            "lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        }

    def state(self) -> dict[str, Any]:
        """Return a copy of the parameters, of the optimizer's tensors and settings, and of the schedule."""
        shard: Any = self.trainer.strategy.parallelism.member.model  # type: ignore[attr-defined]
        [part] = shard.optimizer.chained_optimizers
        groups, names = part.optimizer.param_groups, iter(range(1000))
        tensors = {name: each.detach() for name, each in self.model.named_parameters()}
        for group, number in ((group, next(names)) for group in groups):
            for place, main in enumerate(group["params"]):
                state = part.optimizer.state[main]
                tensors |= {f"{number} {place} {key}": torch.as_tensor(value) for key, value in state.items()}
                tensors[f"{number} {place}"] = main.detach()
        if self.options.fp16:
            tensors["scale"] = part.grad_scaler.scale
        [schedule] = self.trainer.lr_scheduler_configs
        settings = [{**group, "params": len(group["params"])} for group in groups]
        return copy.deepcopy({"tensors": tensors, "groups": settings, "schedule": schedule.scheduler.state_dict()})


def strategy_of(kind: str) -> UnicronMegatronStrategy:
    shim.install()
    options: dict[str, Any] = KINDS[kind]
    buckets, zero = options.get("buckets", False), options.get("zero", False)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=zero, overlap_grad_reduce=buckets, bucket_size=600 if buckets else None
    )
    return UnicronMegatronStrategy(ddp=ddp, sequence_length=LENGTH, redundancy=Redundancy(copies=0) if zero else None)


def checkpoints(rank: int, world: int, folder: Path, kind: str) -> None:
    """Each form of a checkpoint, from `ckpt_path` and as that of an earlier life."""
    for form, way in product(("file", "beside", "parting"), WAYS):
        checkpoint(folder / f"{way} {form}", kind, form, way)


def checkpoint(folder: Path, kind: str, form: str, way: str) -> None:
    path = folder / f"step={SAVED}.ckpt"
    saver: type[ModelCheckpoint] = UnicronCheckpoint if form == "beside" else ModelCheckpoint
    saved = Parts(path) if form == "parting" else Saved()
    writes = [] if form == "parting" else [saver(folder, "{step}", every_n_train_steps=SAVED)]
    fitted(strategy_of(kind), Module(**KINDS[kind]), SAVED, saved, *writes)
    assert path.is_dir() and any(name.endswith(" exp_avg") for name in saved.state["tensors"])
    again = Module(**KINDS[kind])
    itself = [Resumes(path)] if way == "itself" else []
    fitted(strategy_of(kind), again, SAVED + 1, *itself, resume=None if itself else path)
    same(again.found, saved.state)


class Remembered(pl.Callback):
    """Encodes the state for the agents' memory at a step boundary, or takes it."""

    def __init__(self, data: bytes = b"") -> None:
        self.data, self.state = data, dict[str, Any]()

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if self.data:
            state, shard = codec.decode(self.data), _shard(trainer)
            join_state.receive(trainer, state["whole"])
            shard.load_plain(state["shard"])
            if shard.keeper is not None:
                shard.keeper.load_plain([state["shard"]["optimizer"]], SAVED)
            pl_module.found = pl_module.state()

    def on_train_batch_end(self, trainer: pl.Trainer, *others: Any) -> None:
        strategy: Any = trainer.strategy
        if trainer.global_step == SAVED and not self.data:
            model = _shard(trainer)
            shard = model.plain_state()
            if model.keeper is not None:
                shard["optimizer"] = model.keeper.plain_state()
            self.data = codec.encode({"whole": strategy._membership.state(trainer), "shard": shard})
            self.state = trainer.lightning_module.state()


def _shard(trainer: pl.Trainer) -> Any:
    return trainer.strategy.parallelism.member.model  # type: ignore[attr-defined]


def members(rank: int, world: int, folder: Path, kind: str) -> None:
    """The state in the agents' memory, which is a member's."""
    remembered = Remembered()
    fitted(strategy_of(kind), Module(**KINDS[kind]), SAVED, remembered)
    again = Module(**KINDS[kind])
    fitted(strategy_of(kind), again, SAVED + 1, Remembered(remembered.data))
    same(again.found, remembered.state)


def refused(rank: int, world: int, folder: Path) -> list[str]:
    """Return the errors of further runs that are refused, and check that the first model has trained on before."""
    module, found = Module(), []
    trainer = fitted(strategy_of("float32"), module, 1)
    data: Any = trainer.train_dataloader

    def refuse(run: Any, module: Module) -> None:
        try:
            run(module, data)
        except ConfigError as error:
            found.append(str(error))

    refuse(trainer.fit, module)  # its configure_model builds another model
    model, module.configure_model = module.model, lambda: None  # type: ignore[method-assign]
    refuse(trainer.fit, Module())
    refuse(trainer.predict, module)
    module.model = trainer.strategy.parallelism.member.model.module  # type: ignore[attr-defined]
    assert module.model is not model
    trainer.fit_loop.epoch_loop.max_steps = 3
    trainer.fit(module, data)
    assert trainer.global_step == 3
    module.rate = 0.1
    refuse(trainer.fit, module)
    return found


def dropped(rank: int, world: int, folder: Path) -> list[int]:
    """Return the number of open files after each of some fits, whose trainers are dropped with their groups.

    Without the distributed optimizer: megatron-core keeps its own objects, and with them the model.
    """
    found = []
    for _ in range(3):
        fitted(strategy_of("float32"), Module(), 1)
        gc.collect()
        found.append(len(os.listdir("/proc/self/fd")))
    return found
