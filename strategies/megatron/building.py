"""Construction of this worker's part of the model, around which Megatron puts its data parallelism and optimizer."""

from __future__ import annotations

import lightning.pytorch as pl
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.utils import get_model_config

from unicron_lightning.megatron.grid import Shape
from unicron_lightning.megatron.model import ShardModel, sequence_length
from unicron_lightning.megatron.spread import spread_of
from unicron_lightning.megatron.world import current_groups
from unicron_lightning.replica.fabric import ReplicaFabric
from unicron_lightning.replica.mirror import Redundancy
from unicron_lightning.strategies.megatron.checks import (
    check_megatron_config,
    check_megatron_layout,
    find_megatron_module,
)


def build_shard(
    module: pl.LightningModule,
    ddp: DistributedDataParallelConfig,
    optimizer: OptimizerConfig,
    fabric: ReplicaFabric[Shape],
    *,
    micro_batches: int,
    length: int | None,
    redundancy: Redundancy | None,
) -> ShardModel:
    """Wrap the model built by ``configure_model``, and report its shape to the fabric.

    Args:
        module: the user's module.
        ddp: Megatron's configuration of its data parallelism.
        optimizer: Megatron's configuration of its optimizer.
        fabric: provides the layout.
        micro_batches: M.
        length: length of the tensors between pipeline stages; None: the model's longest sequence.
        redundancy: redundancy of the optimizer's shards.

    Raises:
        ConfigError: for settings that cannot be recovered exactly, and a model for another layout.
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
        sequence_length=length,
        groups=current_groups(),
        redundancy=redundancy,
    )
    fabric.built = True
    fabric.spread = spread_of(
        config, model, grid, ordered=fabric.ordered, micro_batches=micro_batches, sequence_length=length
    )
    return shard
