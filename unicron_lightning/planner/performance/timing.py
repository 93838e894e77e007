"""Duration of an optimizer step: computation, communication, and waiting in the pipeline.

One layer of one micro-batch on one worker, forward:

    t_layer = F_matrices / (e_mm Pi) + F_core / (e_mm Pi) + 2 A / (e_mem beta) + 2 t_allreduce(2 s b h bytes, TP)

Pi: peak FLOP/s; beta: memory bandwidth; A: bytes of the layer's activations (`memory`), each written once and read
once. The backward pass has twice the products and the same remaining terms; recomputation adds the forward time of the
recomputed part. Fused attention uses no s x s tensor, skips the masked half of the square, and has five products in the
backward pass instead of four, since it recomputes one of the forward ones.

A step, with m micro-batches, p stages, v groups per stage and t_stage for one micro-batch forward and backward:

    t_step = m t_slowest + (p-1)/v t_stage + t_data + t_optimizer

For equal stages this is m t_stage (1 + (p-1)/(m v)): the bubble of Narayanan et al. 2021, section 2.2. The last stage
also has the output layer. t_data is a ring's all-reduce of the gradients, or a reduce-scatter and an all-gather of the
weights with the distributed optimizer; with overlap only the part that the last backward (first forward) does not hide.

Ignored: stragglers, contention of several jobs in the network, the distance between nodes, start-up costs of kernels,
products too small to fill the accelerator, loading of data, gradient clipping, context and expert parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from unicron_lightning.planner.performance.cluster import Hardware
from unicron_lightning.planner.performance.layouts import RECOMPUTE, FloatArray, IntArray, Layouts
from unicron_lightning.planner.performance.recipe import Recipe
from unicron_lightning.planner.performance.shape import ModelShape
from unicron_lightning.planner.performance.worker_memory import core_bytes, linear_bytes, stage_parameters

_SELECTIVE, _FULL = RECOMPUTE.index("selective"), RECOMPUTE.index("full")


@dataclass(frozen=True, kw_only=True)
class StepSeconds:
    """An optimizer step: seconds of its parts, by configuration. The parts add up to ``total``.

    Attributes:
        stages: work of the slowest stage, including tensor-parallel communication and waiting for neighbours.
        bubble: waiting while the pipeline fills and drains.
        data: data-parallel communication that is not hidden.
        optimizer: the optimizer's update.
    """

    stages: FloatArray
    bubble: FloatArray
    data: FloatArray
    optimizer: FloatArray

    @property
    def total(self) -> FloatArray:
        """Seconds of the step."""
        return self.stages + self.bubble + self.data + self.optimizer


def layer_seconds(
    shape: ModelShape, cluster: Hardware, recipe: Recipe, layouts: Layouts
) -> tuple[FloatArray, FloatArray]:
    """Seconds of one layer's forward and backward pass for one micro-batch, on each of the TP workers that share it.

    They include communication, and the backward pass includes recomputation.
    """
    speed = recipe.efficiency.matmul * cluster.peak(recipe.precision)
    memory_speed = recipe.efficiency.memory * cluster.memory_bandwidth
    matrices = shape.layer_matrix_flops(1) * layouts.micro_batch / layouts.tensor / speed
    core_speed = recipe.efficiency.matmul * cluster.peak(recipe.attention_precision)
    core = shape.layer_attention_flops(1) * layouts.micro_batch / layouts.tensor / core_speed
    rest = 2 * linear_bytes(shape, recipe, layouts) / memory_speed
    if recipe.fused_attention:
        core_forward, core_backward = core / 2, core / 2 * 2.5
    else:
        core_rest = 2 * core_bytes(shape, recipe, layouts) / memory_speed
        core_forward, core_backward = core + core_rest, 2 * core + core_rest
    reduction = 2 * _tensor_seconds(shape, cluster, recipe, layouts)
    forward = matrices + core_forward + rest + reduction
    again = np.where(layouts.recompute == _FULL, forward, np.where(layouts.recompute == _SELECTIVE, core_forward, 0.0))
    return forward, 2 * matrices + core_backward + rest + reduction + again


def step_seconds(shape: ModelShape, cluster: Hardware, recipe: Recipe, layouts: Layouts) -> StepSeconds:
    """Seconds of an optimizer step by its parts."""
    p, v, m = layouts.pipeline, layouts.interleave, layouts.num_micro_batches
    forward, backward = layer_seconds(shape, cluster, recipe, layouts)
    fullest, emptiest = -(-shape.num_layers // p), shape.num_layers // p
    head = _head_seconds(shape, cluster, recipe, layouts)
    exchange = _pipeline_seconds(shape, cluster, recipe, layouts)
    stage = fullest * (forward + backward) + exchange
    # Under an uneven division the last stage has one layer less, which compensates for the output layer.
    last = emptiest * (forward + backward) + exchange + head
    return StepSeconds(
        stages=np.float64(1) * m * np.maximum(stage, last),
        bubble=(p - 1) / v * stage,
        data=_data_seconds(shape, cluster, recipe, layouts, fullest * forward, fullest * backward),
        optimizer=_optimizer_seconds(shape, cluster, recipe, layouts),
    )


def _tensor_seconds(shape: ModelShape, cluster: Hardware, recipe: Recipe, layouts: Layouts) -> FloatArray:
    """An all-reduce of a layer's output over TP; with sequence parallelism its two halves at the same cost."""
    t = layouts.tensor
    within = t <= cluster.accelerators_per_node
    bandwidth = np.where(within, cluster.intra_bandwidth, cluster.inter_bandwidth) * recipe.efficiency.network
    latency = np.where(within, cluster.intra_latency_seconds, cluster.inter_latency_seconds)
    size = recipe.element_bytes * layouts.micro_batch * shape.sequence_length * shape.hidden_size
    seconds: FloatArray = 2 * (t - 1) / t * size / bandwidth + np.where(t > 1, 2 * np.ceil(np.log2(t)) * latency, 0.0)
    return seconds


def _head_seconds(shape: ModelShape, cluster: Hardware, recipe: Recipe, layouts: Layouts) -> FloatArray:
    """The output layer and the loss, forward and backward: 6 s b h V / t products; fp32 results written and read."""
    speed = recipe.efficiency.matmul * cluster.peak(recipe.attention_precision)
    per_sample = 3 * shape.head_flops(1) / speed
    written = 4.0 * shape.sequence_length * shape.vocabulary_size
    per_sample += 4 * written / (recipe.efficiency.memory * cluster.memory_bandwidth)
    return layouts.micro_batch * per_sample / layouts.tensor


def _pipeline_seconds(shape: ModelShape, cluster: Hardware, recipe: Recipe, layouts: Layouts) -> FloatArray:
    """Sending one micro-batch to the next stage and its gradient back, v times; each TP worker sends its part."""
    within = layouts.tensor * layouts.data * 2 <= cluster.accelerators_per_node
    bandwidth = np.where(within, cluster.intra_bandwidth, cluster.inter_bandwidth) * recipe.efficiency.network
    latency = np.where(within, cluster.intra_latency_seconds, cluster.inter_latency_seconds)
    size = recipe.element_bytes * layouts.micro_batch * shape.sequence_length * shape.hidden_size / layouts.tensor
    seconds = 2 * layouts.interleave * (size / bandwidth + latency)
    return np.where(layouts.pipeline > 1, seconds, 0.0)


def _data_bandwidth(cluster: Hardware, layouts: Layouts) -> tuple[FloatArray, FloatArray]:
    """Bytes/s of a data-parallel ring and its latency: TP's members are neighbours, then DP's, then PP's.

    A node's adapters are shared by the rings that leave it; a ring has as many shares as it has members on the node.
    """
    on_node = np.clip(cluster.accelerators_per_node // layouts.tensor, 1, None)
    within = layouts.data <= on_node
    across = np.minimum(cluster.intra_bandwidth, cluster.inter_bandwidth * on_node)
    latency = np.where(within, cluster.intra_latency_seconds, cluster.inter_latency_seconds)
    return np.where(within, cluster.intra_bandwidth, across), latency


def _data_seconds(
    shape: ModelShape,
    cluster: Hardware,
    recipe: Recipe,
    layouts: Layouts,
    first_forward: FloatArray,
    last_backward: FloatArray,
) -> FloatArray:
    """Data-parallel communication of a step that is not hidden behind computation."""
    d = layouts.data
    link, latency = _data_bandwidth(cluster, layouts)
    parameters = np.maximum(stage_parameters(shape, layouts, last=False), stage_parameters(shape, layouts, last=True))
    pass_seconds = (d - 1) / d * parameters / (link * recipe.efficiency.network)
    hops = np.ceil(np.log2(d)) * latency
    reduce = pass_seconds * recipe.gradient_bytes + hops
    gather = pass_seconds * (recipe.weight_bytes if recipe.distributed_optimizer else recipe.gradient_bytes) + hops
    if not recipe.overlap_gradients:
        return reduce + gather
    if not recipe.distributed_optimizer:
        return np.maximum(reduce + gather - last_backward, 0.0)
    return np.maximum(reduce - last_backward, 0.0) + np.maximum(gather - first_forward, 0.0)


def _optimizer_seconds(shape: ModelShape, cluster: Hardware, recipe: Recipe, layouts: Layouts) -> FloatArray:
    """The update: its state, the gradients and the weights read and written once."""
    divided: IntArray = layouts.data if recipe.distributed_optimizer else np.ones_like(layouts.data)
    bytes_moved = 2 * (recipe.weight_bytes + recipe.gradient_bytes + recipe.optimizer_bytes) / divided
    bandwidth = recipe.efficiency.memory * cluster.memory_bandwidth
    return stage_parameters(shape, layouts, last=False) * bytes_moved / bandwidth
