"""Sharding of a module that does not shard itself in ``configure_model``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torchmetrics import Metric

from unicron_lightning.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Options of the sharding.

    Attributes:
        blocks: names of the classes whose modules are sharded one by one; none: the elements of every
            `torch.nn.ModuleList`; a number: modules with at least that number of parameters, without those of smaller
            blocks.
        activation_checkpointing: names of the classes whose modules compute their activations again in the backward.
        reshard_after_forward: as of `fully_shard`.
        cpu_offload: keep parameters, gradients and optimizer state in host memory.
    """

    blocks: tuple[str, ...] | int = ()
    activation_checkpointing: tuple[str, ...] = ()
    reshard_after_forward: bool = True
    cpu_offload: bool = False


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
        ConfigError: no module has a class of one of these names, or that number of parameters; activation
            checkpointing of a module that shards itself.
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
    reshard = sharding.reshard_after_forward
    offload = CPUOffloadPolicy() if sharding.cpu_offload else OffloadPolicy()
    for block in blocks_of(module, sharding.blocks):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=inner, offload_policy=offload)
    for child in module.children():
        if not isinstance(child, FSDPModule) and next(child.parameters(), None) is not None:
            fully_shard(child, mesh=mesh, reshard_after_forward=reshard, mp_policy=outer, offload_policy=offload)
    return PolicyPrecision() if mixed else precision


def place_rest(module: pl.LightningModule, device: torch.device) -> None:
    """Move buffers and metrics to the device of the model; FSDP2 places the parameters."""
    module._device = device
    for each in module.modules():
        if isinstance(each, Metric):
            each.to(device)
        for name, buffer in each._buffers.items():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                each._buffers[name] = buffer.to(device)


def _policy(parameters: torch.dtype, output: torch.dtype | None) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=parameters, reduce_dtype=torch.float32, output_dtype=output)


def blocks_of(module: pl.LightningModule, names: tuple[str, ...] | int) -> list[nn.Module]:
    """Return the modules that are sharded one by one; ``names`` as `Sharding.blocks`, inner modules first.

    Raises:
        ConfigError: no module has a class of one of these names, or that number of parameters.
    """
    if isinstance(names, int):
        return _of_size(module, names)
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


def _of_size(module: pl.LightningModule, least: int) -> list[nn.Module]:
    """The modules below the module's own submodules that have that number of parameters beside those of smaller blocks.

    Modules that share a parameter with another one belong to no block, since FSDP2 shards such parameters together.
    """
    holders = Counter(id(each) for part in module.modules() for each in part._parameters.values() if each is not None)
    found: list[nn.Module] = []

    def visit(part: nn.Module, depth: int) -> tuple[int, bool]:
        whole = isinstance(part, nn.MultiheadAttention)  # it reads its projection's weight without calling that
        own = list(part.parameters()) if whole else [each for each in part._parameters.values() if each is not None]
        below = [] if whole else [visit(child, depth + 1) for child in part.children()]
        left = sum(each.numel() for each in own) + sum(number for number, _ in below)
        shares = any(holders[id(each)] > 1 for each in own) or any(shared for _, shared in below)
        if depth > 1 and left >= least and not shares and not isinstance(part, nn.ModuleList | nn.ModuleDict):
            found.append(part)
            return 0, False
        return left, shares

    visit(module, 0)
    if not found:
        parts = [part for child in module.children() for part in child.children()]
        largest = max((sum(each.numel() for each in part.parameters()) for part in parts), default=0)
        raise ConfigError(
            f"blocks={least!r}: expected a number of parameters that a module below {type(module).__qualname__}'s "
            f"submodules has, without sharing them with another module; the largest has {largest}"
        )
    return found
