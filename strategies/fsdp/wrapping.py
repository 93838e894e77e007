"""Sharding of a module that does not shard itself in ``configure_model``."""

from __future__ import annotations

import lightning.pytorch as pl
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from unicron_lightning.errors import ConfigError


def shard_module(
    module: pl.LightningModule, mesh: DeviceMesh, blocks: tuple[str, ...], *, reshard_after_forward: bool
) -> None:
    """Shard the blocks of a module, and then each of its direct submodules that has other parameters.

    A module with sharded submodules is left as it is.

    Args:
        module: of the user.
        mesh: of a replica's shards.
        blocks: names of the classes of blocks; none: the elements of every `torch.nn.ModuleList`.
        reshard_after_forward: as of `fully_shard`.

    Raises:
        ConfigError: no module has a class of one of these names.
    """
    if any(isinstance(each, FSDPModule) for each in module.modules()):
        return
    for block in _blocks(module, blocks):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
    for child in module.children():
        if not isinstance(child, FSDPModule) and next(child.parameters(), None) is not None:
            fully_shard(child, mesh=mesh, reshard_after_forward=reshard_after_forward)


def _blocks(module: pl.LightningModule, names: tuple[str, ...]) -> list[nn.Module]:
    if not names:
        lists = [each for each in module.modules() if isinstance(each, nn.ModuleList)]
        return [block for each in lists for block in each if next(block.parameters(), None) is not None]
    found = [each for each in module.modules() if type(each).__name__ in names]
    missing = sorted(set(names) - {type(each).__name__ for each in found})
    if missing:
        there = sorted({type(each).__name__ for each in module.modules()})
        raise ConfigError(f"blocks={names!r}: no module is a {missing[0]}; expected classes among {', '.join(there)}")
    return found
