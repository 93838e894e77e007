"""Memory of a worker in bytes: the model's state and the activations kept for the backward pass.

Activations are those of Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (arXiv
2205.05198), table 2, equations 1 to 6, per layer and micro-batch with 2-byte elements and 1-byte masks:

    no parallelism                        s b h (34 + 5 a s/h)                                       (1)
    tensor parallel                       s b h (10 + 24/t + 5 a s/(h t))                            (2)
    tensor and sequence parallel          s b h (34/t + 5 a s/(h t))                                 (4)
    selective recomputation               the same without the terms 5 a s
    full recomputation                    2 s b h

The first stage keeps p micro-batches of l/p layers, which are l layers for any p; with interleaving 1 + (p-1)/(p v)
times as much. Counted tensor by tensor, the terms also hold for grouped keys and values and for gated or other widths
of the feed-forward part (an extension; the paper has h and 4 h there). Fused attention keeps no s x s tensor.

Communication buffers and fragmentation are not counted; `Cluster.reserved_bytes` covers them. If p does not divide l,
every stage is counted as the largest one.
"""

from __future__ import annotations

import numpy as np

from unicron_lightning.planner.performance.layouts import RECOMPUTE, FloatArray, Layouts
from unicron_lightning.planner.performance.recipe import Recipe
from unicron_lightning.planner.performance.shape import ModelShape

_SELECTIVE, _FULL = RECOMPUTE.index("selective"), RECOMPUTE.index("full")


def worker_bytes(shape: ModelShape, recipe: Recipe, layouts: Layouts) -> FloatArray:
    """Bytes needed by the fullest worker, which is one of the first or of the last stage."""
    first = state_bytes(shape, recipe, layouts, last=False) + first_stage_activation_bytes(shape, recipe, layouts)
    last = state_bytes(shape, recipe, layouts, last=True) + last_stage_activation_bytes(shape, recipe, layouts)
    return np.maximum(first, last * (layouts.pipeline > 1))


def stage_parameters(shape: ModelShape, layouts: Layouts, *, last: bool) -> FloatArray:
    """Parameters of one worker of the first or last stage. Norms, a thousandth of all parameters, count as divided."""
    layers = -(-shape.num_layers // layouts.pipeline) * shape.layer_parameters
    untied = 0 if shape.tied_embeddings else shape.head_parameters
    alone = shape.embedding_parameters + untied
    # A tied output layer on another stage than the embedding is a second copy of it.
    ends = shape.head_parameters if last else shape.embedding_parameters
    return (layers + np.where(layouts.pipeline == 1, alone, ends)) / layouts.tensor


def state_bytes(shape: ModelShape, recipe: Recipe, layouts: Layouts, *, last: bool) -> FloatArray:
    """Bytes of weights, gradients and optimizer state of one worker of the first stage or of the last."""
    divided = layouts.data if recipe.distributed_optimizer else np.ones_like(layouts.data)
    per_parameter = recipe.weight_bytes + recipe.gradient_bytes + recipe.optimizer_bytes / divided
    return stage_parameters(shape, layouts, last=last) * per_parameter


def core_bytes(shape: ModelShape, recipe: Recipe, layouts: Layouts) -> FloatArray:
    """Bytes of one layer's s x s tensors of one micro-batch on one worker: softmax, its mask, and dropout's output."""
    per_sample = float(shape.num_heads * shape.sequence_length**2)
    # Softmax; its mask and the output of dropout, which equals softmax without dropout.
    kept = 2 * recipe.element_bytes + 1 if recipe.dropout else recipe.element_bytes
    return layouts.micro_batch * per_sample * kept / layouts.tensor


def linear_bytes(shape: ModelShape, recipe: Recipe, layouts: Layouts) -> FloatArray:
    """Bytes of one layer's other tensors of one micro-batch on one worker: 34 s b h / t in the paper's shape."""
    h, kv, size = shape.hidden_size, shape.kv_size, recipe.element_bytes
    ffn = shape.ffn * (3 if shape.gated else 2)
    # Divided by TP: queries, keys, values, the output projection's input; the feed-forward part's inner tensors.
    inside = size * (h + 2 * kv + h + ffn)
    # Divided only with sequence parallelism: inputs of both norms and of both parts; the two dropout masks.
    outside = size * 4 * h + (2 * h if recipe.dropout else 0)
    tokens = layouts.micro_batch * shape.sequence_length
    return tokens * (inside / layouts.tensor + outside / (layouts.tensor if recipe.sequence_parallel else 1))


def layer_activation_bytes(shape: ModelShape, recipe: Recipe, layouts: Layouts) -> FloatArray:
    """Bytes that one layer keeps of one micro-batch on one worker until its backward pass."""
    linear = linear_bytes(shape, recipe, layouts)
    keeps_core = (layouts.recompute < _SELECTIVE) & (not recipe.fused_attention)
    kept = linear + np.where(keeps_core, core_bytes(shape, recipe, layouts), 0.0)
    kept_of_full = _boundary_bytes(shape, recipe, layouts)
    result: FloatArray = kept_of_full * (layouts.recompute == _FULL) + kept * (layouts.recompute != _FULL)
    return result


def first_stage_activation_bytes(shape: ModelShape, recipe: Recipe, layouts: Layouts) -> FloatArray:
    """Bytes of activations of one worker of the first stage when most micro-batches are in progress."""
    p, v, t = layouts.pipeline, layouts.interleave, layouts.tensor
    layers = -(-shape.num_layers // p)
    under_way = np.minimum(p, layouts.num_micro_batches) * np.where(v > 1, 1 + (p - 1) / (p * v), 1.0)
    # The embedding's dropout mask; and, if this is the last stage too, the tensors for the loss.
    masks = layouts.micro_batch * shape.sequence_length * shape.hidden_size * under_way / t * recipe.dropout
    loss = np.where(p == 1, _loss_bytes(shape, recipe, layouts), 0.0)
    kept = layer_activation_bytes(shape, recipe, layouts) * layers * under_way
    result: FloatArray = kept + masks + loss + _working_bytes(shape, recipe, layouts)
    return result


def last_stage_activation_bytes(shape: ModelShape, recipe: Recipe, layouts: Layouts) -> FloatArray:
    """Bytes of activations of one worker of the last stage, with one micro-batch (v groups of it) in progress."""
    layers = -(-shape.num_layers // layouts.pipeline)
    kept = layer_activation_bytes(shape, recipe, layouts) * layers
    return kept + _loss_bytes(shape, recipe, layouts) + _working_bytes(shape, recipe, layouts)


def _boundary_bytes(shape: ModelShape, recipe: Recipe, layouts: Layouts) -> FloatArray:
    """A layer's input, which full recomputation keeps: 2 s b h."""
    per_sample = float(recipe.element_bytes * shape.sequence_length * shape.hidden_size)
    return layouts.micro_batch.astype(np.float64) * per_sample


def _working_bytes(shape: ModelShape, recipe: Recipe, layouts: Layouts) -> FloatArray:
    """Bytes of the one layer that is recomputed during its backward pass, or of that layer's s x s part."""
    core = core_bytes(shape, recipe, layouts) * (0.0 if recipe.fused_attention else 1.0)
    whole = linear_bytes(shape, recipe, layouts) + core
    result: FloatArray = whole * (layouts.recompute == _FULL) + core * (layouts.recompute == _SELECTIVE)
    return result


def _loss_bytes(shape: ModelShape, recipe: Recipe, layouts: Layouts) -> FloatArray:
    """Inputs of the last norm and of the output layer, and its result in fp32: (4 s b h + 4 s b V) / t."""
    per_token = 2 * recipe.element_bytes * shape.hidden_size + 4 * shape.vocabulary_size
    return layouts.micro_batch * shape.sequence_length * per_token / layouts.tensor
