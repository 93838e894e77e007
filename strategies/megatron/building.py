"""Construction of this worker's part of the model, around which Megatron puts its data parallelism and optimizer."""

from __future__ import annotations

from typing import Any, Final

import lightning.pytorch as pl
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.utils import get_model_config
from torch import nn

from unicron_lightning import wire
from unicron_lightning.megatron.grid import Shape
from unicron_lightning.megatron.model import ShardModel, sequence_length
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


_STAGES_OF_THEIR_OWN: Final = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
)
"""Fields of Megatron's configuration by which layers are not divided evenly among stages."""


def spread_of(
    config: Any, module: nn.Module, shape: Shape, *, ordered: bool, micro_batches: int, sequence_length: int
) -> wire.Spread:
    """A model's layout, and its sizes that TP and PP have to divide: the coordinator refuses other orders in time.

    A model may have further constraints; in a layout in which it cannot be built, its task's next life fails.

    Args:
        config: Megatron's `TransformerConfig`.
        module: Megatron's model.
        shape: the present one.
        ordered: whether the coordinator ordered it.
        micro_batches: M.
        sequence_length: of the tensors that pipeline stages exchange.
    """
    tensor = {
        name: getattr(config, name, None) for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size")
    }
    tensor["vocab_size"] = _vocabulary(module)
    if getattr(config, "sequence_parallel", False):
        tensor["sequence_length"] = sequence_length
    evenly = not any(getattr(config, name, None) for name in _STAGES_OF_THEIR_OWN)
    return wire.Spread(
        layout=wire.Layout(tensor=shape.tensor, pipeline=shape.pipeline),
        ordered=ordered,
        workers=shape.shards * shape.replicas,
        micro_batches=micro_batches,
        tensor_divides={name: size for name, size in tensor.items() if size},
        pipeline_divides={"num_layers": config.num_layers} if evenly else {},
    )


def _vocabulary(module: nn.Module) -> int | None:
    """Rows of the embedding, if the model specifies them."""
    inner: Any = module
    while not hasattr(inner, "vocab_size"):
        if not hasattr(inner, "module"):
            return None
        inner = inner.module
    return int(inner.vocab_size)
