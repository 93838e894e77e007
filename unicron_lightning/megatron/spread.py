"""A built model's constraints on layouts, by which the coordinator refuses impossible orders in time."""

from __future__ import annotations

from typing import Any, Final

from torch import nn

from unicron_lightning import wire
from unicron_lightning.megatron.grid import Shape

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
    """A model's layout, and its sizes that TP and PP have to divide.

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
