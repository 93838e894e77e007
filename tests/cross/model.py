"""The model and the data of a script."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, Final

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from cross.cases import Script
from cross.striking import Strikes
from fsdp.preconditioned import PRECONDITIONED
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import MeanMetric

PLAN: Final = {
    "backbone.0": ColwiseParallel(output_layouts=Replicate()),
    "mixing.0": ColwiseParallel(),
    "mixing.2": RowwiseParallel(),
}
"""How tensor parallelism divides the layers; the others are whole on each worker."""
LARGE: Final = 2.6
"""Batches with a larger value overflow, if gradients are scaled."""


class Core(nn.Module):
    """Two layers beside each other, two after each other, and a head.

    Args:
        script: names its parts.
        middle: has the head's input, whose backward is in the middle of the whole.
    """

    def __init__(self, script: Script, middle: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._middle = middle
        norm = nn.BatchNorm1d(4) if script.norm else nn.Identity()
        self.backbone = nn.Sequential(nn.Linear(3, 4), norm, nn.Dropout(0.2 if script.dropout else 0.0))
        self.extra = nn.Linear(3, 4)
        self.mixing = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
        if script.tied:
            self.mixing[2].weight = self.mixing[0].weight
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = (self.backbone(x) + self.extra(x)).tanh()
        found: torch.Tensor = self.head(self._middle(hidden + self.mixing(hidden)))
        return found


class Net(pl.LightningModule):
    """Learns the sine of a sum, by a script's settings."""

    def __init__(self, script: Script, strikes: Strikes | None, *, plain: bool) -> None:
        super().__init__()
        self.script, self.automatic_optimization = script, script.optimizer != "manual"
        self.plain = plain
        vars(self)["strikes"] = strikes
        torch.manual_seed(0)
        self.core = Core(script, lambda value: self._strikes_at("within_backward", value))
        if script.metric:
            self.seen = MeanMetric()
        if script.unused:
            self.unused = nn.Linear(2, 2)
        self.register_buffer("offset", torch.zeros(1, dtype=torch.float64))
        if script.own:
            self.gain = nn.Parameter(torch.ones(1))
        if script.frozen:
            self.core.extra.requires_grad_(False)

    @property
    def head(self) -> nn.Linear:
        return self.core.head

    def configure_model(self) -> None:
        if self.script.strategy == "unicron_fsdp" and not self.plain and not isinstance(self.head.weight, DTensor):
            mesh: Any = self.device_mesh
            if mesh["tensor_parallel"].size() > 1:
                parallelize_module(self.core, mesh["tensor_parallel"], PLAN)
            mesh = mesh["data_parallel"]
            for part in (self.core.backbone, self.core.mixing, self.core):
                fully_shard(part, mesh=mesh)

    def on_train_epoch_start(self) -> None:
        if self.script.frozen == "first":
            self.core.extra.requires_grad_(self.current_epoch > 0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.strikes is not None:
            self.strikes.at("forward", self.trainer)
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        if self.script.metric:
            self.seen(loss.detach())
            self.log("seen", self.seen, on_step=False, on_epoch=True)
        self.log("used", checksum(batch), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        loss = self._strikes_at("backward", loss)
        if self.script.scaler and max(float(part[0].max()) for part in parts(batch)) > LARGE:
            loss = loss * torch.inf
        if self.plain:
            loss = loss * self.weight(batch_idx)
        if self.automatic_optimization:
            return loss
        return self._by_hand(loss, batch_idx)

    def _strikes_at(self, point: str, value: torch.Tensor) -> torch.Tensor:
        """Return a value in whose backward the worker may die."""
        if self.strikes is None or not value.requires_grad:
            return value
        return Backward.apply(value, self, point)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def weight(self, batch_idx: int) -> float:
        """Return the weight of a batch's loss, which Lightning divides by the number of batches of a full step.

        A short step has the mean of its batches times its part of the rounds, as under ddp.
        """
        batches, whole, devices = (
            self.trainer.num_training_batches,
            self.trainer.accumulate_grad_batches,
            self.script.devices,
        )
        present = min(whole, int(batches) - batch_idx // whole * whole)
        return -(-present // devices) * devices / present

    def loss(self, batch: Any) -> torch.Tensor:
        x = torch.cat([part[0] for part in parts(batch)]).to(self.head.weight.dtype)
        found = self.core(x) * (self.gain if self.script.own else 1.0)
        if self.script.buffer and self.training:
            self.offset = 0.9 * self.offset + 0.01 * x.mean()
        return (found + self.offset.to(found.dtype) - x.sum(1, keepdim=True).sin()).square().mean()

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
        head, rest = list(self.head.parameters()), [p for n, p in self.named_parameters() if ".head." not in n]
        if not self.automatic_optimization:
            one = torch.optim.Adam(rest, lr=0.02, eps=1e-2)
            other = torch.optim.SGD(head, lr=0.05, momentum=0.9)
            return [one, other], ([] if not script.schedule else [torch.optim.lr_scheduler.StepLR(one, 2)])
        groups: Any = [{"params": [*rest, *head]}]
        if script.groups == 2:
            groups = [{"params": rest, "lr": 0.03}, {"params": head}]
        kinds: Any = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW, **PRECONDITIONED}
        options: Any = {"momentum": 0.9} if script.optimizer == "sgd" else {"eps": 1e-2}
        options = {"eps": 0.5} if script.optimizer in PRECONDITIONED else options
        optimizer = kinds[script.optimizer](groups, lr=0.05, **options)
        if not script.schedule:
            return optimizer
        if script.schedule == "plateau":
            schedule: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "loss"}}
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": script.schedule}}


def checksum(batch: Any) -> torch.Tensor:
    """Return a number whose sum over an epoch depends on which samples were used, and how often."""
    return torch.stack([(part[0] * 2**20).round().remainder(1009).pow(2).sum() for part in parts(batch)]).sum()


def parts(batch: Any) -> list[Any]:
    """Return what each loader has given to a batch."""
    return list(batch.values()) if isinstance(batch, dict) else [batch]


class Backward(torch.autograd.Function):
    """Passes a value on, and strikes at a point in its backward."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, module: pl.LightningModule, point: str) -> torch.Tensor:
        context.module, context.point = module, point
        return value.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        strikes = context.module.strikes
        strikes.at(context.point, context.module.trainer)
        return gradients[0], None, None


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


class OneDevice:
    """The batches of all devices in the order in which a world has them, round by round, for one device."""

    def __init__(self, script: Script, number: int, seed: int) -> None:
        self._script, self._number, self._seed, self._epoch = script, number, seed, 0
        self.sampler = self  # Lightning sets the epoch of a batch sampler's sampler

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __iter__(self) -> Iterator[list[int]]:
        devices, size = self._script.devices, 2
        order = torch.arange(self._number)
        if self._script.data == "map":
            order = torch.randperm(self._number, generator=torch.Generator().manual_seed(self._seed + self._epoch))
        for start in range(0, self._number, devices * size):
            whole = order[start : start + devices * size]
            yield from (part for device in range(devices) if (part := whole[device::devices].tolist()))


def data(script: Script, *, plain: bool) -> Any:
    """Return the training data: at least six steps of an epoch."""
    number = script.samples * script.workers // 2
    dataset = TensorDataset(samples(number, 2 if script.data == "stream" else 1))
    if plain:
        return DataLoader(dataset, batch_sampler=OneDevice(script, number, 3))  # type: ignore[arg-type]
    whole = script.strategy == "unicron_megatron"  # micro-batches of one size
    match script.data:
        case "stream":
            return DataLoader(Stream(number), batch_size=2, drop_last=whole)
        case "both":
            other = DataLoader(Stream(10), batch_size=2 if whole else 1, drop_last=whole)
            return {"a": DataLoader(dataset, batch_size=2, shuffle=True, drop_last=whole), "b": other}
        case "budget":
            return DataLoader(dataset, batch_sampler=Budget(number))  # type: ignore[arg-type]
    return DataLoader(dataset, batch_size=2, shuffle=True, drop_last=whole)
