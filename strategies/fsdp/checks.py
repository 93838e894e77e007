"""Settings that ``unicron_fsdp`` refuses, each with one error that names the value and the alternative."""

from __future__ import annotations

import lightning.pytorch as pl
import torchmetrics
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from unicron_lightning.errors import ConfigError

_GATHERING = ("Muon", "Shampoo", "DistributedShampoo", "SOAP", "LBFGS")
"""Optimizers that need whole parameters, or several evaluations of the loss."""


def check_sharded_trainer(trainer: pl.Trainer, *, has_run: bool) -> None:
    """Refuse trainer settings.

    Raises:
        ConfigError: naming the setting.
    """
    if has_run or trainer.state.fn != TrainerFn.FITTING:
        raise ConfigError("the unicron_fsdp strategy supports one trainer.fit per script, and nothing beside it")
    if str(trainer.precision) != "32-true":
        raise ConfigError(
            f"Trainer(precision={trainer.precision!r}): unicron_fsdp supports '32-true'; set a "
            "MixedPrecisionPolicy(param_dtype=torch.bfloat16) with fully_shard in configure_model for bf16"
        )
    if trainer.strategy.root_device.type != "cpu":
        raise ConfigError(
            f"accelerator on {trainer.strategy.root_device.type!r}: unicron_fsdp has been run with accelerator='cpu' "
            "only, and refuses others until it has been tested there"
        )


def check_sharded_module(module: pl.LightningModule) -> None:
    """Refuse models whose state a worker could not recover exactly.

    Raises:
        ConfigError: naming the submodule or the parameter.
    """
    for name, each in module.named_modules():
        if isinstance(each, _NormBase) and each.track_running_stats:
            raise ConfigError(
                f"{name} is a {type(each).__name__} with running statistics, which unicron_fsdp does not average over "
                "replicas; expected track_running_stats=False, or another normalization"
            )
        if isinstance(each, torchmetrics.Metric):
            raise ConfigError(
                f"{name} is a torchmetrics object, {type(each).__name__}; under unicron_fsdp log values with self.log"
            )
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, DTensor):
            raise ConfigError(
                f"parameter {name} is not sharded; expected fully_shard on the submodule that holds it, or the "
                "parameter in a submodule instead of the LightningModule itself"
            )
        if parameter.device_mesh.ndim != 1 or parameter.placements != (Shard(0),):
            raise ConfigError(
                f"parameter {name} has the placements {parameter.placements} on a mesh of {parameter.device_mesh.ndim} "
                "dimensions; expected one dimension, device_mesh['data_parallel'], sharded along the first axis"
            )
    if isinstance(module, FSDPModule):
        raise ConfigError(
            f"fully_shard is applied to {type(module).__qualname__} itself, whose training_step FSDP2 does not see; "
            "expected it on the model that training_step calls"
        )


def check_sharded_optimizer(optimizer: Optimizer) -> None:
    """Refuse optimizers that need whole parameters.

    Raises:
        ConfigError: naming the class.
    """
    name = type(optimizer).__name__
    if name in _GATHERING:
        raise ConfigError(
            f"{name} needs whole parameters, of which each worker has a shard; expected an optimizer that works on "
            "each element, such as AdamW or SGD"
        )
