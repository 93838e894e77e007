"""This worker's part of the model, around which Megatron puts its data parallelism and optimizer."""

from __future__ import annotations

import lightning.pytorch as pl
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.utils import get_model_config

from unicron_lightning.megatron.fabric import GridFabric
from unicron_lightning.megatron.mirror import Redundancy
from unicron_lightning.megatron.model import ShardModel, sequence_length
from unicron_lightning.megatron.spread import spread_of
from unicron_lightning.megatron.world import current_groups
from unicron_lightning.strategies.megatron_checks import (
    check_megatron_config,
    check_megatron_layout,
    find_megatron_module,
)


def build_shard(
    module: pl.LightningModule,
    ddp: DistributedDataParallelConfig,
    optimizer: OptimizerConfig,
    fabric: GridFabric,
    *,
    micro_batches: int,
    length: int | None,
    redundancy: Redundancy | None,
) -> ShardModel:
    """Takes what ``configure_model`` has built, and tells the fabric that and how it is.

    Args:
        module: the user's.
        ddp: Megatron's configuration of its data parallelism.
        optimizer: of its optimizer.
        fabric: tells the layout.
        micro_batches: M.
        length: of what pipeline stages exchange; None: the model's longest sequence.
        redundancy: of the optimizer's shards.

    Raises:
        ConfigError: for what cannot be recovered exactly, and a model for another layout.
    """
    model, grid = find_megatron_module(module), fabric.shape
    config = get_model_config(model)
    check_megatron_config(config, ddp, optimizer)
    check_megatron_layout(config, grid)
    length = length or sequence_length(model)
    shard = ShardModel(
        model,
        ddp,
        optimizer,
        replicas=grid.replicas,
        micro_batches=micro_batches // grid.replicas,
        sequence_length=length,
        groups=current_groups(),
        redundancy=redundancy,
    )
    fabric.built = True
    fabric.spread = spread_of(
        config, model, grid, ordered=fabric.ordered, micro_batches=micro_batches, sequence_length=length
    )
    return shard
