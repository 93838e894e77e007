"""Sharding of a module that does not shard itself in ``configure_model``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from unicron_lightning.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Options of the sharding.

    Attributes:
        blocks: names of the classes whose modules are sharded one by one; none: the elements of every
            `torch.nn.ModuleList`.
        activation_checkpointing: names of the classes whose modules compute their activations again in the backward.
        reshard_after_forward: as of `fully_shard`.
    """

    blocks: tuple[str, ...] = ()
    activation_checkpointing: tuple[str, ...] = ()
    reshard_after_forward: bool = True


class PolicyPrecision(Precision):
    """Mixed precision by FSDP2's policy, and not by autocast: parameters are gathered in bfloat16, their shards and the
    sums of gradients are float32.
    """

    precision = "bf16-mixed"


def shard_module(module: pl.LightningModule, mesh: DeviceMesh, sharding: Sharding, precision: Precision) -> Precision:
    """Shard the blocks of a module, and then each of its direct submodules that has other parameters.

    A module with sharded submodules is left as it is.

    Args:
        module: of the user.
        mesh: of a replica's shards.
        sharding: the options.
        precision: Lightning's plugin.

    Returns:
        The plugin to use.

    Raises:
        ConfigError: no module has a class of one of these names; activation checkpointing of a module that shards
            itself.
    """
    if any(isinstance(each, FSDPModule) for each in module.modules()):
        if sharding.activation_checkpointing:
            raise ConfigError(
                f"activation_checkpointing={sharding.activation_checkpointing!r}: {type(module).__qualname__} shards "
                "itself; expected torch's checkpoint or checkpoint_wrapper in its configure_model"
            )
        return precision
    if sharding.activation_checkpointing:
        for each in _of_classes(module, "activation_checkpointing", sharding.activation_checkpointing):
            checkpoint(each)  # before fully_shard, which then gathers the parameters around the second forward, too
    mixed = precision.precision == "bf16-mixed"
    inner = _policy(torch.bfloat16, None) if mixed else MixedPrecisionPolicy()
    outer = _policy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
    for block in _blocks(module, sharding.blocks):
        fully_shard(block, mesh=mesh, reshard_after_forward=sharding.reshard_after_forward, mp_policy=inner)
    for child in module.children():
        if not isinstance(child, FSDPModule) and next(child.parameters(), None) is not None:
            fully_shard(child, mesh=mesh, reshard_after_forward=sharding.reshard_after_forward, mp_policy=outer)
    return PolicyPrecision() if mixed else precision


def _policy(parameters: torch.dtype, output: torch.dtype | None) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=parameters, reduce_dtype=torch.float32, output_dtype=output)


def _blocks(module: pl.LightningModule, names: tuple[str, ...]) -> list[nn.Module]:
    if names:
        return _of_classes(module, "blocks", names)
    lists = [each for each in module.modules() if isinstance(each, nn.ModuleList)]
    return [block for each in lists for block in each if next(block.parameters(), None) is not None]


def _of_classes(module: pl.LightningModule, option: str, names: Sequence[str]) -> list[nn.Module]:
    found = [each for each in module.modules() if type(each).__name__ in names]
    missing = sorted(set(names) - {type(each).__name__ for each in found})
    if missing:
        there = sorted({type(each).__name__ for each in module.modules()})
        raise ConfigError(
            f"{option}={tuple(names)!r}: no module is a {missing[0]}; expected classes among {', '.join(there)}"
        )
    return found
