"""A megatron-core GPT of ten thousand parameters over bytes of English text, for tests, examples and demonstrations.

It has the features of a large one: stages and slices, tied embeddings, sequence parallelism, bf16, dropout. On a
machine without CUDA call `unicron_lightning.megatron.shim.install` first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_batch_on_this_cp_rank
from torch import Tensor, nn
from torch.utils.data import Dataset

from unicron_lightning.demo.dataset import Windows

VOCABULARY = 256
"""Number of tokens: the values of a byte."""


@dataclass(frozen=True, kw_only=True)
class Toy:
    """The model's sizes and options.

    Args:
        layers, hidden, heads: of the transformer.
        length: bytes of context.
        dropout: of attention and hidden activations alike.
        bf16: whether parameters and activations are in bf16, as in megatron-core's ``Float16Module``.
        fp16: the same in fp16; with ``double`` only losses are scaled.
        tied: whether the output layer shares the embedding's weight.
        sequence_parallel: whether tensor parallelism splits activations along the sequence between its collectives.
        experts: of each layer; 0: dense layers.
        router: further fields of the configuration about experts, such as ``moe_router_topk``.
        double: whether parameters and activations are in float64.
    """

    layers: int = 4
    hidden: int = 32
    heads: int = 4
    length: int = 16
    dropout: float = 0.0
    bf16: bool = False
    tied: bool = True
    sequence_parallel: bool = False
    experts: int = 0
    router: Mapping[str, Any] = field(default_factory=dict)
    double: bool = False
    fp16: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Type of the parameters."""
        if self.double:
            return torch.float64
        return torch.bfloat16 if self.bf16 else torch.float16 if self.fp16 else torch.float32


class SequenceParallelNorm(nn.LayerNorm):
    """LayerNorm for sequence parallelism, which megatron-core's wrapper of torch's refuses.

    Its parameters carry the mark by which megatron-core sums their gradients over the tensor-parallel group.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class _SequenceGather(torch.autograd.Function):
    """Concatenates the parts of a sequence that the ranks of a group have, [part, ...] each, in their order."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(ctx.group.size())[ctx.group.rank()].contiguous(), None


def _positions(part: int, parts: int, length: int) -> Tensor:
    """Positions of a context-parallel rank's tokens, as megatron-core's ``get_batch_on_this_cp_rank`` divides them."""
    half = length // 2
    first, second = part * half, (2 * parts - 1 - part) * half
    return torch.cat([torch.arange(first, first + half), torch.arange(second, second + half)])


class GatheredAttention(nn.Module):
    """Causal attention of a part of each sequence to the keys and values of all parts.

    Megatron-core's own attention without Transformer Engine refuses context parallelism.
    """

    def __init__(self, config: TransformerConfig, *_: Any, **__: Any) -> None:
        super().__init__()
        self.dropout = nn.Dropout(config.attention_dropout)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Attend; all arguments, and the result's parts by head, are [part of the sequence, samples, heads, size]."""
        group = parallel_state.get_context_parallel_group()
        gather: Any = _SequenceGather.apply
        keys, values = gather(key, group), gather(value, group)
        length, samples = query.shape[:2]
        own = _positions(group.rank(), group.size(), length)
        every = torch.cat([_positions(part, group.size(), length) for part in range(group.size())])
        scores = torch.einsum("qbhd,kbhd->bhqk", query, keys) / query.shape[-1] ** 0.5
        hidden = (every[None, :] > own[:, None]).to(query.device)
        weights = self.dropout(scores.masked_fill(hidden, float("-inf")).softmax(-1))
        return torch.einsum("bhqk,kbhd->qbhd", weights, values).reshape(length, samples, -1)


def config(toy: Toy, **parallel: Any) -> TransformerConfig:
    """The transformer's configuration.

    Args:
        toy: sizes and options.
        parallel: fields about the layout, such as ``tensor_model_parallel_size``.
    """
    experts = {"num_moe_experts": toy.experts, "moe_router_topk": 2, **toy.router} if toy.experts else {}
    # messages in both directions between two stages would be confused in one batch
    overlapped = bool(parallel.get("virtual_pipeline_model_parallel_size"))
    return TransformerConfig(
        overlap_p2p_comm=overlapped,
        batch_p2p_comm=not overlapped,
        num_layers=toy.layers,
        hidden_size=toy.hidden,
        num_attention_heads=toy.heads,
        attention_dropout=toy.dropout,
        hidden_dropout=toy.dropout,
        bf16=toy.bf16,
        fp16=toy.fp16,
        params_dtype=toy.dtype,
        pipeline_dtype=toy.dtype,
        sequence_parallel=toy.sequence_parallel,
        use_cpu_initialization=True,  # initial values do not depend on TP
        # a key's bias has no gradient but rounding noise, which Adam would scale up to whole steps
        add_bias_linear=False,
        gradient_accumulation_fusion=False,  # this and the following options need Apex
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **experts,
        **parallel,
    )


def model(toy: Toy, transformer: TransformerConfig) -> nn.Module:
    """This rank's part of the model, a `ModuleList` with virtual stages; megatron-core's ``parallel_state`` and random
    states must have been initialised.

    With several pipeline stages and tied embeddings this is a collective of the embedding group.
    """
    layer = get_gpt_layer_local_spec(num_experts=toy.experts or None, moe_grouped_gemm=False)
    if transformer.context_parallel_size > 1:
        layer.submodules.self_attention.submodules.core_attention = GatheredAttention
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = SequenceParallelNorm
    virtual = transformer.virtual_pipeline_model_parallel_size
    layers = toy.layers // (transformer.pipeline_model_parallel_size * (virtual or 1))

    def stage(number: int | None) -> nn.Module:
        gpt = GPTModel(
            config=transformer,
            transformer_layer_spec=TransformerBlockSubmodules(
                layer_specs=[layer] * layers, layer_norm=SequenceParallelNorm
            ),
            vocab_size=VOCABULARY,
            max_sequence_length=toy.length,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=number),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=number),
            share_embeddings_and_output_weights=toy.tied,
            vp_stage=number,
        )
        if toy.double:
            gpt.double()
        wrapped: nn.Module = Float16Module(transformer, gpt) if toy.dtype.itemsize == 2 else gpt
        return wrapped

    return nn.ModuleList([stage(number) for number in range(virtual)]) if virtual else stage(None)


class Text(Dataset[dict[str, Tensor]]):
    """Map-style samples {"tokens": [length], "labels": [length]}, int64: each label is the next byte.

    Args:
        length: bytes of context.
        limit: largest number of samples.
    """

    def __init__(self, length: int, limit: int = 100_000) -> None:
        self._windows = Windows(0.0, 1.0, length, limit)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        _, window = self._windows[index]
        return {"tokens": window[:-1], "labels": window[1:]}


def forward(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Run one micro-batch through this rank's stage.

    Args:
        model: the stage, with or without megatron-core's DDP around it.
        batch: "tokens" and "labels" of shape [micro-batch, length].

    Returns:
        The loss of each token, [micro-batch, length], on the last stage, else activations for the next one; with
        context parallelism, of this rank's part of the sequence.
    """
    tokens = batch["tokens"]
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    part = get_batch_on_this_cp_rank({"tokens": tokens, "labels": batch["labels"], "positions": positions})
    output: Tensor = model(part["tokens"], part["positions"], None, labels=part["labels"])
    return output


def balance() -> float:
    """The routers' auxiliary losses of the present micro-batch, summed over layers, without their coefficients."""
    return sum(float(each["values"].sum()) for each in get_moe_layer_wise_logging_tracker().values())


def loss(output: Tensor) -> Tensor:
    """The micro-batch's mean loss, a scalar."""
    return output.float().mean()
