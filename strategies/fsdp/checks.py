"""Settings that ``unicron_fsdp`` refuses, each with one error that names the value and the alternative."""

from __future__ import annotations

import lightning.pytorch as pl
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from unicron_lightning.errors import ConfigError
from unicron_lightning.worker.communication.nccl import check_device

_GATHERING = ("Muon", "Shampoo", "DistributedShampoo", "SOAP", "LBFGS")
"""Optimizers that need whole parameters, or several evaluations of the loss."""

_PRECISIONS = ("32-true", "64-true", "bf16-true", "bf16-mixed")


def check_sharded_trainer(trainer: pl.Trainer, *, offloads: bool) -> None:
    """Refuse trainer settings.

    Args:
        trainer: of the script.
        offloads: whether the strategy has ``cpu_offload=True``.

    Raises:
        ConfigError: naming the setting.
    """
    if str(trainer.precision) not in _PRECISIONS:
        raise ConfigError(
            f"Trainer(precision={trainer.precision!r}): unicron_fsdp supports {', '.join(map(repr, _PRECISIONS))}"
        )
    check_device(trainer.strategy.root_device)
    if offloads and trainer.strategy.root_device.type == "cpu":
        raise ConfigError(
            "cpu_offload=True: with accelerator='cpu' parameters and optimizer are in host memory already; expected "
            "False"
        )


def check_sharded_module(module: pl.LightningModule) -> None:
    """Refuse models that are not sharded as expected.

    Raises:
        ConfigError: naming the parameter.
    """
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


def check_same_module(module: pl.LightningModule, mesh: object) -> None:
    """Refuse another module than that of the script's earlier runs.

    Raises:
        ConfigError: naming it.
    """
    if module._device_mesh is not mesh:
        raise ConfigError(
            f"this {type(module).__qualname__} is not the module of the script's first run; unicron_fsdp supports one"
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
