"""T(t,x) of a transformer on a described cluster, from formulas: the model for a task without measurements.

Many parallel configurations are held as arrays (`Layouts`), so that the formulas evaluate them all at once.

**Memory of a worker** in bytes: the model's state and the activations kept for the backward pass.

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

Context parallelism divides all of these by c, for it divides the tokens. With experts, each token has k times the inner
tensors of the feed-forward part, and k inputs and outputs of experts, which TP does not divide: expert tensor
parallelism gathers them.

Communication buffers and fragmentation are not counted; `Cluster.reserved_bytes` covers them. If p does not divide l,
every stage is counted as the largest one.

**Duration of an optimizer step**: computation, communication, and waiting in the pipeline.

One layer of one micro-batch on one worker, forward:

    t_layer = F_matrices / (e_mm Pi) + F_core / (e_mm Pi) + 2 A / (e_mem beta) + 2 t_allreduce(2 s b h bytes, TP)

Pi: peak FLOP/s; beta: memory bandwidth; A: bytes of the layer's activations, each written once and read
once. The backward pass has twice the products and the same remaining terms; recomputation adds the forward time of the
recomputed part. Fused attention uses no s x s tensor, skips the masked half of the square, and has five products in the
backward pass instead of four, since it recomputes one of the forward ones.

A step, with m micro-batches, p stages, v groups per stage and t_stage for one micro-batch forward and backward:

    t_step = m t_slowest + (p-1)/v t_stage + t_data + t_optimizer

For equal stages this is m t_stage (1 + (p-1)/(m v)): the bubble of Narayanan et al. 2021, section 2.2. The last stage
also has the output layer. t_data is a ring's all-reduce of the gradients, or a reduce-scatter and an all-gather of the
weights with the distributed optimizer; with overlap only the part that the last backward (first forward) does not hide.
The copies of a parameter are c d, of an expert's c d / e: each has a ring of its own.

With experts, one of a layer's two all-reduces over TP is one of k times its size, and each token goes to k experts and
back, 2 t_alltoall(2 s b h k / (c t) bytes, EP): of e workers at stride t, those of another node get their part over
the network. The tokens are taken as divided evenly among the experts. With CP, keys and values go round the c workers
behind the products of the s x s part; the rest that these do not hide is added.

Ignored: stragglers, contention of several jobs in the network, the distance between nodes, start-up costs of kernels,
products too small to fill the accelerator (as those of many small experts), loading of data, gradient clipping.

**The best configuration** for every number of workers at once.

All combinations of TP, PP, CP, EP, interleaving, micro-batch, recomputation and DP that divide evenly are laid out as
arrays.
Combinations that do not fit in memory are dropped, and the fastest is kept for each number of workers. The number of
combinations depends on the divisors of the model's sizes and of the global batch, not on the size of the cluster.

Candidates:

* TP divides the heads, the groups of keys and values (or they divide it), the feed-forward width, and the accelerators
  of a node: it never leaves a node.
* PP divides the layers; v groups per stage divide its layers again, and p then divides m (Narayanan et al. 2021, 2.2).
* CP is a power of two that leaves each worker 4,096 tokens or more of a sequence.
* EP divides the experts and CP x DP. Expert tensor parallelism is TP, as Megatron-core has it unless told otherwise.
* DP x b divides the global batch. With ``uneven_shares`` some copies have one micro-batch less, as with this package's
  strategy; the copies with most micro-batches then determine the duration of the step.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from unicron_lightning.errors import check_numbers
from unicron_lightning.planner.arrays import FloatArray, IntArray
from unicron_lightning.planner.performance.description import (
    MEGATRON_CORE,
    PRESETS,
    RECIPES,
    SCALING_LOSS,
    Hardware,
    ModelShape,
    Recipe,
    Recompute,
    TransformerProfile,
)
from unicron_lightning.planner.performance.model import ParallelConfiguration, check_num_workers

_BoolArray = NDArray[np.bool_]

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """Parallel configurations as integer arrays of one length.

    Attributes:
        tensor: TP, t.
        pipeline: PP, p.
        data: DP, d.
        micro_batch: samples in a micro-batch, b.
        num_micro_batches: per step, of the copy with most micro-batches, m.
        interleave: groups of layers per stage, v.
        recompute: index into `RECOMPUTE`.
        context: CP, c.
        expert: EP, e, a divisor of c d.
    """

    tensor: IntArray
    pipeline: IntArray
    data: IntArray
    micro_batch: IntArray
    num_micro_batches: IntArray
    interleave: IntArray
    recompute: IntArray
    context: IntArray
    expert: IntArray

    @property
    def num_workers(self) -> IntArray:
        """TP x PP x CP x DP."""
        return self.tensor * self.pipeline * self.copies

    @property
    def copies(self) -> IntArray:
        """Copies of a parameter that is not an expert's: CP x DP."""
        return self.context * self.data

    def tokens(self, shape: ModelShape) -> FloatArray:
        """Tokens of a micro-batch on one worker: s b / c."""
        return self.micro_batch * (shape.sequence_length / self.context)

    def __len__(self) -> int:
        return len(self.tensor)

    def at(self, index: IntArray | _BoolArray | slice) -> Layouts:
        """The configurations selected by ``index``."""
        return Layouts(**{field.name: getattr(self, field.name)[index] for field in fields(self)})

    def configuration(self, index: int, memory_bytes: int) -> ParallelConfiguration:
        """One configuration in the form that the planner uses."""
        return ParallelConfiguration(
            tensor_parallel=int(self.tensor[index]),
            pipeline_parallel=int(self.pipeline[index]),
            data_parallel=int(self.data[index]),
            micro_batch_size=int(self.micro_batch[index]),
            num_micro_batches=int(self.num_micro_batches[index]),
            interleave=int(self.interleave[index]),
            recompute=RECOMPUTE[int(self.recompute[index])],
            memory_bytes=memory_bytes,
            context_parallel=int(self.context[index]),
            expert_parallel=int(self.expert[index]),
        )

    @staticmethod
    def concatenate(parts: list[Layouts]) -> Layouts:
        """All of the parts' configurations, in order."""
        return Layouts(
            **{
                field.name: np.concatenate([getattr(part, field.name) for part in parts], dtype=np.int64)
                for field in fields(Layouts)
            }
        )


_SELECTIVE, _FULL = RECOMPUTE.index("selective"), RECOMPUTE.index("full")


def worker_bytes(shape: ModelShape, recipe: Recipe, layouts: Layouts) -> FloatArray:
    """Bytes needed by the fullest worker, which is one of the first or of the last stage."""
    first = state_bytes(shape, recipe, layouts, last=False) + first_stage_activation_bytes(shape, recipe, layouts)
    last = state_bytes(shape, recipe, layouts, last=True) + _last_stage_activation_bytes(shape, recipe, layouts)
    return np.maximum(first, last * (layouts.pipeline > 1))


def stage_parameters(shape: ModelShape, layouts: Layouts, *, last: bool) -> FloatArray:
    """Parameters of one worker of the first or last stage without experts.

    Norms, a thousandth of all parameters, count as divided.
    """
    layers = -(-shape.num_layers // layouts.pipeline) * shape.layer_parameters
    untied = 0 if shape.tied_embeddings else shape.head_parameters
    alone = shape.embedding_parameters + untied
    # A tied output layer on another stage than the embedding is a second copy of it.
    ends = shape.head_parameters if last else shape.embedding_parameters
    return (layers + np.where(layouts.pipeline == 1, alone, ends)) / layouts.tensor


def expert_parameters(shape: ModelShape, layouts: Layouts) -> FloatArray:
    """Parameters of the experts of one worker, of its fullest stage."""
    layers = -(-shape.num_layers // layouts.pipeline) * shape.num_experts * shape.expert_parameters
    return layers / (layouts.tensor * layouts.expert)


def state_bytes(shape: ModelShape, recipe: Recipe, layouts: Layouts, *, last: bool) -> FloatArray:
    """Bytes of weights, gradients and optimizer state of one worker of the first stage or of the last."""
    common, experts = _optimizer_bytes(recipe, layouts)
    kept = recipe.weight_bytes + recipe.gradient_bytes
    whole = stage_parameters(shape, layouts, last=last) * (kept + common)
    return whole + expert_parameters(shape, layouts) * (kept + experts)


def _optimizer_bytes(recipe: Recipe, layouts: Layouts) -> tuple[FloatArray, FloatArray]:
    """Bytes of optimizer state on one worker, by parameter: of all but experts, and of experts."""
    whole = np.full(len(layouts), float(recipe.optimizer_bytes))
    if not recipe.distributed_optimizer:
        return whole, whole
    return whole / layouts.copies, whole / (layouts.copies // layouts.expert)


def _core_bytes(shape: ModelShape, recipe: Recipe, layouts: Layouts) -> FloatArray:
    """Bytes of one layer's s x s tensors of one micro-batch on one worker: softmax, its mask, and dropout's output."""
    per_token = float(shape.num_heads * shape.sequence_length)
    # Softmax; its mask and the output of dropout, which equals softmax without dropout.
    kept = 2 * recipe.element_bytes + 1 if recipe.dropout else recipe.element_bytes
    return layouts.tokens(shape) * per_token * kept / layouts.tensor


def linear_bytes(shape: ModelShape, recipe: Recipe, layouts: Layouts) -> FloatArray:
    """Bytes of one layer's other tensors of one micro-batch on one worker: 34 s b h / t in the paper's shape."""
    h, kv, size = shape.hidden_size, shape.kv_size, recipe.element_bytes
    ffn = shape.ffn_matrices * (shape.ffn * max(1, shape.experts_per_token) + shape.shared_expert_size)
    # Divided by TP: queries, keys, values, the output projection's input; the feed-forward part's inner tensors.
    inside = size * (2 * shape.query_size + 2 * kv + ffn)
    # Divided only with sequence parallelism: inputs of both norms and of both parts; the two dropout masks.
    outside = size * 4 * h + (2 * h if recipe.dropout else 0)
    # Never divided: inputs and outputs of a token's experts.
    undivided = size * 2 * h * shape.experts_per_token
    divided = inside / layouts.tensor + outside / (layouts.tensor if recipe.sequence_parallel else 1)
    return layouts.tokens(shape) * (divided + undivided)


def layer_activation_bytes(shape: ModelShape, recipe: Recipe, layouts: Layouts) -> FloatArray:
    """Bytes that one layer keeps of one micro-batch on one worker until its backward pass."""
    linear = linear_bytes(shape, recipe, layouts)
    keeps_core = (layouts.recompute < _SELECTIVE) & (not recipe.fused_attention)
    kept = linear + np.where(keeps_core, _core_bytes(shape, recipe, layouts), 0.0)
    kept_of_full = _boundary_bytes(shape, recipe, layouts)
    result: FloatArray = kept_of_full * (layouts.recompute == _FULL) + kept * (layouts.recompute != _FULL)
    return result


def first_stage_activation_bytes(shape: ModelShape, recipe: Recipe, layouts: Layouts) -> FloatArray:
    """Bytes of activations of one worker of the first stage when most micro-batches are in progress."""
    p, v, t = layouts.pipeline, layouts.interleave, layouts.tensor
    layers = -(-shape.num_layers // p)
    under_way = np.minimum(p, layouts.num_micro_batches) * np.where(v > 1, 1 + (p - 1) / (p * v), 1.0)
    # The embedding's dropout mask; and, if this is the last stage too, the tensors for the loss.
    masks = layouts.tokens(shape) * shape.hidden_size * under_way / t * recipe.dropout
    loss = np.where(p == 1, _loss_bytes(shape, recipe, layouts), 0.0)
    kept = layer_activation_bytes(shape, recipe, layouts) * layers * under_way
    result: FloatArray = kept + masks + loss + _working_bytes(shape, recipe, layouts)
    return result


def _last_stage_activation_bytes(shape: ModelShape, recipe: Recipe, layouts: Layouts) -> FloatArray:
    """Bytes of activations of one worker of the last stage, with one micro-batch (v groups of it) in progress."""
    layers = -(-shape.num_layers // layouts.pipeline)
    kept = layer_activation_bytes(shape, recipe, layouts) * layers
    return kept + _loss_bytes(shape, recipe, layouts) + _working_bytes(shape, recipe, layouts)


def _boundary_bytes(shape: ModelShape, recipe: Recipe, layouts: Layouts) -> FloatArray:
    """A layer's input, which full recomputation keeps: 2 s b h."""
    return layouts.tokens(shape) * float(recipe.element_bytes * shape.hidden_size)


def _working_bytes(shape: ModelShape, recipe: Recipe, layouts: Layouts) -> FloatArray:
    """Bytes of the one layer that is recomputed during its backward pass, or of that layer's s x s part."""
    core = _core_bytes(shape, recipe, layouts) * (0.0 if recipe.fused_attention else 1.0)
    whole = linear_bytes(shape, recipe, layouts) + core
    result: FloatArray = whole * (layouts.recompute == _FULL) + core * (layouts.recompute == _SELECTIVE)
    return result


def _loss_bytes(shape: ModelShape, recipe: Recipe, layouts: Layouts) -> FloatArray:
    """Inputs of the last norm and of the output layer, and its result in fp32: (4 s b h + 4 s b V) / t."""
    per_token = 2 * recipe.element_bytes * shape.hidden_size + 4 * shape.vocabulary_size
    return layouts.tokens(shape) * per_token / layouts.tensor


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
    """Seconds of one layer's forward and backward pass for one micro-batch, on each of the workers that share it.

    They include communication, and the backward pass includes recomputation.
    """
    speed = recipe.efficiency.matmul * cluster.peak(recipe.precision)
    memory_speed = recipe.efficiency.memory * cluster.memory_bandwidth
    shares = layouts.micro_batch / (layouts.tensor * layouts.context)
    matrices = shape.layer_matrix_flops(1) * shares / speed
    core_speed = recipe.efficiency.matmul * cluster.peak(recipe.attention_precision)
    core = shape.layer_attention_flops(1) * shares / core_speed
    rest = 2 * linear_bytes(shape, recipe, layouts) / memory_speed
    if recipe.fused_attention:
        core_forward, core_backward = core / 2, core / 2 * 2.5
    else:
        core_rest = 2 * _core_bytes(shape, recipe, layouts) / memory_speed
        core_forward, core_backward = core + core_rest, 2 * core + core_rest
    # Keys and values go round behind the products; in the backward pass their gradients, too.
    round_trip = _context_seconds(shape, cluster, recipe, layouts)
    core_forward = np.maximum(core_forward, round_trip)
    core_backward = np.maximum(core_backward, 2 * round_trip)
    reduction = (1 + max(1, shape.experts_per_token)) * _tensor_seconds(shape, cluster, recipe, layouts)
    if shape.num_experts:
        reduction = reduction + 2 * _expert_seconds(shape, cluster, recipe, layouts)
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
    size = recipe.element_bytes * layouts.tokens(shape) * shape.hidden_size
    seconds: FloatArray = 2 * (t - 1) / t * size / bandwidth + np.where(t > 1, 2 * np.ceil(np.log2(t)) * latency, 0.0)
    return seconds


def _expert_seconds(shape: ModelShape, cluster: Hardware, recipe: Recipe, layouts: Layouts) -> FloatArray:
    """The tokens of a micro-batch on their way to their experts, or back: an all-to-all over EP."""
    e, t = layouts.expert, layouts.tensor
    near = np.minimum(e, np.maximum(1, cluster.accelerators_per_node // t))
    size = recipe.element_bytes * layouts.tokens(shape) * shape.hidden_size * shape.experts_per_token / t
    network = recipe.efficiency.network
    within = (near - 1) / e * size / (cluster.intra_bandwidth * network)
    across = (e - near) / e * size / (cluster.inter_bandwidth * network)
    latency = np.where(near < e, cluster.inter_latency_seconds, cluster.intra_latency_seconds)
    return np.maximum(within, across) + np.where(e > 1, np.ceil(np.log2(e)) * latency, 0.0)


def _context_seconds(shape: ModelShape, cluster: Hardware, recipe: Recipe, layouts: Layouts) -> FloatArray:
    """Keys and values of a micro-batch on their way round the CP workers that share its sequences."""
    c, t = layouts.context, layouts.tensor
    within = c * t <= cluster.accelerators_per_node
    bandwidth = np.where(within, cluster.intra_bandwidth, cluster.inter_bandwidth) * recipe.efficiency.network
    latency = np.where(within, cluster.intra_latency_seconds, cluster.inter_latency_seconds)
    size = recipe.element_bytes * layouts.tokens(shape) * 2 * shape.kv_size / t
    seconds: FloatArray = (c - 1) * (size / bandwidth + latency)
    return seconds


def _head_seconds(shape: ModelShape, cluster: Hardware, recipe: Recipe, layouts: Layouts) -> FloatArray:
    """The output layer and the loss, forward and backward: 6 s b h V / t products; fp32 results written and read."""
    speed = recipe.efficiency.matmul * cluster.peak(recipe.attention_precision)
    per_sample = 3 * shape.head_flops(1) / speed
    written = 4.0 * shape.sequence_length * shape.vocabulary_size
    per_sample += 4 * written / (recipe.efficiency.memory * cluster.memory_bandwidth)
    return layouts.micro_batch * per_sample / (layouts.tensor * layouts.context)


def _pipeline_seconds(shape: ModelShape, cluster: Hardware, recipe: Recipe, layouts: Layouts) -> FloatArray:
    """Sending one micro-batch to the next stage and its gradient back, v times; each TP worker sends its part."""
    within = layouts.tensor * layouts.copies * 2 <= cluster.accelerators_per_node
    bandwidth = np.where(within, cluster.intra_bandwidth, cluster.inter_bandwidth) * recipe.efficiency.network
    latency = np.where(within, cluster.intra_latency_seconds, cluster.inter_latency_seconds)
    size = recipe.element_bytes * layouts.tokens(shape) * shape.hidden_size / layouts.tensor
    seconds = 2 * layouts.interleave * (size / bandwidth + latency)
    return np.where(layouts.pipeline > 1, seconds, 0.0)


def _ring(cluster: Hardware, neighbours: IntArray, members: IntArray) -> tuple[FloatArray, FloatArray]:
    """Bytes/s of a data-parallel ring and its latency, whose members are ``neighbours`` workers apart.

    TP's members are neighbours, then EP's, then DP's, then PP's. A node's adapters are shared by the rings that leave
    it; a ring has as many shares as it has members on the node.
    """
    on_node = np.clip(cluster.accelerators_per_node // neighbours, 1, None)
    within = members <= on_node
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
    parameters = np.maximum(stage_parameters(shape, layouts, last=False), stage_parameters(shape, layouts, last=True))
    pass_seconds, hops = _ring_seconds(cluster, recipe, layouts.tensor, layouts.copies, parameters)
    if shape.num_experts:
        apart, copies = layouts.tensor * layouts.expert, layouts.copies // layouts.expert
        theirs = _ring_seconds(cluster, recipe, apart, copies, expert_parameters(shape, layouts))
        pass_seconds, hops = pass_seconds + theirs[0], hops + theirs[1]
    reduce = pass_seconds * recipe.gradient_bytes + hops
    gather = pass_seconds * (recipe.weight_bytes if recipe.distributed_optimizer else recipe.gradient_bytes) + hops
    if not recipe.overlap_gradients:
        return reduce + gather
    if not recipe.distributed_optimizer:
        return np.maximum(reduce + gather - last_backward, 0.0)
    return np.maximum(reduce - last_backward, 0.0) + np.maximum(gather - first_forward, 0.0)


def _ring_seconds(
    cluster: Hardware, recipe: Recipe, neighbours: IntArray, members: IntArray, parameters: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Seconds for each byte of the parameters in a reduce-scatter or an all-gather, and those of its latencies."""
    link, latency = _ring(cluster, neighbours, members)
    pass_seconds = (members - 1) / members * parameters / (link * recipe.efficiency.network)
    return pass_seconds, np.ceil(np.log2(members)) * latency


def _optimizer_seconds(shape: ModelShape, cluster: Hardware, recipe: Recipe, layouts: Layouts) -> FloatArray:
    """The update: its state, the gradients and the weights read and written once."""
    moved = 2 * (recipe.weight_bytes + recipe.gradient_bytes + recipe.optimizer_bytes)
    copies = layouts.copies if recipe.distributed_optimizer else layouts.expert
    parts = stage_parameters(shape, layouts, last=False) + expert_parameters(shape, layouts) * layouts.expert
    return parts * moved / copies / (recipe.efficiency.memory * cluster.memory_bandwidth)


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """Configurations to try: all TP, PP and interleavings that divide, with these choices.

    Attributes:
        micro_batch_sizes: samples in a micro-batch.
        recompute: some of ``none``, ``selective``, ``full``.
        uneven_shares: whether DP need not divide the global batch.
        interleaves: whether a stage may have several groups of layers (v > 1).
        contexts: degrees of CP; None: all that leave enough of a sequence.
        experts: degrees of EP; None: all that divide.
        most_workers: most computing workers; None: as many as the batch can use.

    Raises:
        ValueError: no micro-batch size is given or one is below 1, or a recomputation is unknown.
    """

    micro_batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16)
    recompute: tuple[str, ...] = RECOMPUTE
    uneven_shares: bool = False
    interleaves: bool = True
    contexts: tuple[int, ...] | None = None
    experts: tuple[int, ...] | None = None
    most_workers: int | None = None

    def __post_init__(self) -> None:
        check_numbers(self, "most_workers", least=1)
        if not self.micro_batch_sizes or min(self.micro_batch_sizes) < 1:
            raise ValueError(f"micro_batch_sizes={self.micro_batch_sizes!r}: expected whole numbers of at least 1")
        if not self.recompute or any(choice not in RECOMPUTE for choice in self.recompute):
            raise ValueError(f"recompute={self.recompute!r}: expected some of {', '.join(RECOMPUTE)}")


@dataclass(frozen=True, kw_only=True)
class _BestConfigurations:
    """The best configuration for each number of workers that has one.

    Attributes:
        num_workers: rising, each once.
        step_seconds: of the best configuration with exactly that many.
        memory_bytes: of its fullest worker.
        layouts: the configurations.
    """

    num_workers: IntArray
    step_seconds: FloatArray
    memory_bytes: FloatArray
    layouts: Layouts


def search(
    shape: ModelShape, cluster: Hardware, recipe: Recipe, space: SearchSpace, global_batch_size: int
) -> _BestConfigurations:
    """Find the best configurations of a task, over all numbers of workers.

    Among equally fast ones the order of the search decides: less PP, less TP, CP and EP, less interleaving, less
    recomputation, larger micro-batches (fewer kernels, which the formulas do not charge for).
    """
    parts: list[tuple[Layouts, FloatArray, FloatArray]] = []
    for layouts in _candidates(shape, cluster, recipe, space, global_batch_size):
        memory = worker_bytes(shape, recipe, layouts)
        fits = memory <= cluster.usable_bytes
        layouts, memory = layouts.at(fits), memory[fits]
        seconds = step_seconds(shape, cluster, recipe, layouts).total
        best = _best_per_count(layouts.num_workers, seconds)
        parts.append((layouts.at(best), seconds[best], memory[best]))
    layouts = Layouts.concatenate([part[0] for part in parts])
    seconds = np.concatenate([part[1] for part in parts])
    memory = np.concatenate([part[2] for part in parts])
    best = _best_per_count(layouts.num_workers, seconds)
    layouts = layouts.at(best)
    return _BestConfigurations(
        num_workers=layouts.num_workers, step_seconds=seconds[best], memory_bytes=memory[best], layouts=layouts
    )


def _best_per_count(num_workers: IntArray, seconds: FloatArray) -> IntArray:
    """Indices of the fastest configuration of each count, by rising count; among equally fast ones the first."""
    # A stable sort lets the search's order decide among equals; single precision removes differences by rounding.
    order = np.lexsort((seconds.astype(np.float32), num_workers))
    _, first = np.unique(num_workers[order], return_index=True)
    return order[first].astype(np.int64)


def _candidates(
    shape: ModelShape, cluster: Hardware, recipe: Recipe, space: SearchSpace, global_batch_size: int
) -> Iterator[Layouts]:
    """Candidates, one PP at a time to bound the memory of the arrays."""
    contexts = space.contexts or _context_degrees(shape)
    experts = space.experts or _divisors(max(1, shape.num_experts))
    shares = (
        (c, e, *batch)
        for c, e, batch in itertools.product(contexts, experts, list(_batches(space, global_batch_size)))
        if c * batch[1] % e == 0
    )
    batches = np.array(list(shares), dtype=np.int64).reshape(-1, 5)
    # Fused attention never keeps the tensors that `selective` would recompute, which makes it equal to `none`.
    skipped = "selective" if recipe.fused_attention and "none" in space.recompute else ""
    choices = [choice for choice in RECOMPUTE if choice in space.recompute and choice != skipped]
    recompute = np.array([RECOMPUTE.index(choice) for choice in choices], dtype=np.int64)
    tensor = np.array(_tensor_degrees(shape, cluster), dtype=np.int64)
    most = space.most_workers or np.iinfo(np.int64).max
    for p in (degree for degree in _divisors(shape.num_layers) if degree <= most):
        groups = _divisors(shape.num_layers // p) if p > 1 and space.interleaves else [1]
        interleave = np.array(groups, dtype=np.int64)
        grid = np.meshgrid(tensor, interleave, recompute, np.arange(len(batches)), indexing="ij")
        t, v, again, batch = (axis.ravel() for axis in grid)
        c, e, b, d, m = batches[batch].T
        yield Layouts(
            tensor=t,
            pipeline=np.full_like(t, p),
            data=d,
            micro_batch=b,
            num_micro_batches=m,
            interleave=v,
            recompute=again,
            context=c,
            expert=e,
        ).at(((v == 1) | (m % p == 0)) & (t * p * c * d <= most))


def _tensor_degrees(shape: ModelShape, cluster: Hardware) -> list[int]:
    kv = shape.kv_heads
    return [
        t
        for t in _divisors(cluster.accelerators_per_node)
        if shape.num_heads % t == 0 and shape.ffn % t == 0 and (kv % t == 0 or t % kv == 0)
    ]


_LEAST_TOKENS = 4096
"""Tokens of a sequence that a worker has at least under context parallelism; fewer are not worth the way round."""


def _context_degrees(shape: ModelShape) -> list[int]:
    most = max(1, shape.sequence_length // _LEAST_TOKENS)
    return [degree for degree in (1, 2, 4, 8, 16, 32) if degree <= most and shape.sequence_length % degree == 0]


def _batches(space: SearchSpace, global_batch_size: int) -> Iterator[tuple[int, int, int]]:
    """(b, d, m): micro-batch size, copies, and micro-batches of the copy with most micro-batches."""
    for b in sorted(space.micro_batch_sizes, reverse=True):
        if global_batch_size % b:
            continue
        micro_batches = global_batch_size // b
        most = min(micro_batches, space.most_workers or micro_batches)
        copies = range(1, most + 1) if space.uneven_shares else [d for d in _divisors(micro_batches) if d <= most]
        # More copies with equally many micro-batches each are no faster, but divide the optimizer's state further.
        yield from ((b, d, -(-micro_batches // d)) for d in copies)


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


# Root mean square of the relative errors of free search against published runs that no constant was fitted to, rounded
# up (benchmarks/planner_model.py prints them). With the published configurations it is 0.07: most of the error is the
# choice of a better configuration than was run, and software that is older than the recipe.
RELATIVE_ERROR = 0.27
# The same with experts, with the published configurations: 0.18 for eight large experts, 0.57 for many small ones.
EXPERTS_ERROR = 0.41


@dataclass(frozen=True, kw_only=True)
class TransformerModel:
    """The best throughput of a task with x workers, by search over its parallel configurations.

    The search runs once for all x, at the first call.

    Attributes:
        shape: the trained model.
        cluster: the machines.
        global_batch_size: B, samples per optimizer step; the same for all x.
        recipe: the training method and its efficiency.
        space: the configurations to try.
        may_idle: whether the task may leave some of its x workers idle. Then T never falls with x; otherwise T is 0
            where no configuration takes exactly x workers.
        scaling_loss: part of a step's time that each doubling of the number of nodes adds to the formulas.

    Raises:
        ValueError: the batch or the loss is out of range, or the cluster has no figure for the precision.
    """

    shape: ModelShape
    cluster: Hardware
    global_batch_size: int
    recipe: Recipe = MEGATRON_CORE
    space: SearchSpace = field(default_factory=SearchSpace)
    may_idle: bool = True
    scaling_loss: float = SCALING_LOSS

    def __post_init__(self) -> None:
        check_numbers(self, "global_batch_size", least=1)
        check_numbers(self, "scaling_loss", least=0)
        for precision in (self.recipe.precision, self.recipe.attention_precision):
            self.cluster.peak(precision)

    @classmethod
    def of(
        cls,
        profile: TransformerProfile,
        *,
        accelerator: str = "",
        accelerators_per_node: int = 8,
        ordered: bool = False,
        most_workers: int | None = None,
    ) -> TransformerModel:
        """Make the model of a user's profile.

        Args:
            profile: the description.
            accelerator: a key of `PRESETS`, unless the profile names one.
            accelerators_per_node: g, unless the profile states it.
            ordered: whether to keep to layouts that the coordinator can order: without interleaved stages, and with CP
                only as the profile states it.
            most_workers: as in `SearchSpace`.
        """
        hardware = PRESETS[profile.accelerator or accelerator]
        context, expert = profile.context_parallel or (1 if ordered else None), profile.expert_parallel
        space = SearchSpace(
            uneven_shares=profile.uneven_shares,
            interleaves=not ordered,
            contexts=None if context is None else (context,),
            experts=None if expert is None else (expert,),
            most_workers=most_workers,
        )
        if profile.micro_batch_size is not None:
            space = dataclasses.replace(space, micro_batch_sizes=(profile.micro_batch_size,))
        return cls(
            shape=ModelShape(**{each.name: getattr(profile, each.name) for each in fields(ModelShape)}),
            cluster=dataclasses.replace(
                hardware, accelerators_per_node=profile.accelerators_per_node or accelerators_per_node
            ),
            global_batch_size=profile.global_batch_size,
            recipe=RECIPES[profile.recipe],
            space=space,
            may_idle=profile.may_idle,
            scaling_loss=profile.scaling_loss,
        )

    @property
    def step_flops(self) -> int:
        """The model's FLOPs of one optimizer step; T x duration of a step."""
        return self.shape.step_flops(self.global_batch_size)

    def throughput(self, num_workers: int) -> float:
        index = self._index(num_workers)
        return 0.0 if index is None else float(self._throughput[index])

    def configuration(self, num_workers: int) -> ParallelConfiguration | None:
        index = self._index(num_workers)
        return None if index is None else self._best.layouts.configuration(index, int(self._best.memory_bytes[index]))

    def uncertainty(self, num_workers: int) -> float:
        check_num_workers(num_workers)
        return EXPERTS_ERROR if self.shape.num_experts else RELATIVE_ERROR

    @property
    def counts(self) -> tuple[int, ...]:
        """The numbers of workers at which T changes, rising."""
        return tuple(int(count) for count in self._best.num_workers)

    @cached_property
    def _best(self) -> _BestConfigurations:
        """The best configuration for each count; if workers may idle, only counts that beat all smaller ones."""
        found = search(self.shape, self.cluster, self.recipe, self.space, self.global_batch_size)
        nodes = np.maximum(1.0, found.num_workers / self.cluster.accelerators_per_node)
        slower = found.step_seconds * (1 + self.scaling_loss * np.log2(nodes))
        found = dataclasses.replace(found, step_seconds=slower)
        if not self.may_idle or not len(found.num_workers):
            return found
        record = np.minimum.accumulate(found.step_seconds)
        better = np.concatenate([[True], found.step_seconds[1:] < record[:-1]])
        return _BestConfigurations(
            num_workers=found.num_workers[better],
            step_seconds=found.step_seconds[better],
            memory_bytes=found.memory_bytes[better],
            layouts=found.layouts.at(better),
        )

    @cached_property
    def _throughput(self) -> FloatArray:
        return self.step_flops / self._best.step_seconds

    def _index(self, num_workers: int) -> int | None:
        """Index in `_best` for ``num_workers``."""
        check_num_workers(num_workers)
        counts = self._best.num_workers
        index = int(np.searchsorted(counts, num_workers, side="right")) - 1
        if index < 0 or (not self.may_idle and counts[index] != num_workers):
            return None
        return index
