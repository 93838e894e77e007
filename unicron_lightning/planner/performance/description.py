"""What the analytic model is computed from: the shape of a transformer, the machines, and the training method.

**Shape**: parameters and floating-point operations. The counts are those of Narayanan et al. 2021, "Efficient
Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (arXiv 2104.04473), section 5.1 and appendix,
generalised to grouped keys and values, to any width of the feed-forward part, and to gated ones. With the paper's
shapes they equal

    P = 12 l h^2 (1 + 13/(12 h) + (V + s)/(12 l h))                                     parameters
    F = 96 B s l h^2 (1 + s/(6 h) + V/(16 l h))              FLOPs of a step with full recomputation
    F = 72 B s l h^2 (1 + s/(6 h) + V/(12 l h))              FLOPs of a step without: the *model's* FLOPs

B: global batch (samples), s: sequence length (tokens), l: layers, h: hidden size, V: vocabulary. A multiply-add is two
operations; only matrix products are counted; attention counts the whole s x s square, masked or not. T(t,x) is in the
model's FLOPs, which exclude recomputation. Selective recomputation adds its 4 B s^2 h per layer; the formula of
Korthikanti et al. 2022 (s/(3 h) for s/(6 h)) counts three times as much.

**Experts**: with E experts, of which k compute each token, the feed-forward part of a layer has E times the parameters
of one, a router (h x E) and k times the FLOPs of one, however the tokens are distributed. A shared expert computes all
tokens.

**Machines**: the speed of an accelerator and of the network. The presets are the vendor's published figures, all
without structured sparsity; each names its source. Bandwidths are in one direction, of one accelerator, whereas NVIDIA
gives the sum of both for NVLink. Two unpublished figures are assumed: latencies, which matter little beside the bytes
of large models, and memory that is not available to the model.

**Recipe**: the training method and its efficiency, the measured part of the model. `Efficiency` holds the only fitted
constants of the analytic model: the fractions of the hardware's peak that a program reaches in matrix products, in
everything bound by memory, and in communication. The values are fitted to published measurements named beside them, and
the tests state the errors of predictions for *other* published runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from unicron_lightning.errors import check_numbers

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer.

    Attributes:
        num_layers: l.
        hidden_size: h.
        num_heads: a, a divisor of h.
        sequence_length: s, in tokens.
        vocabulary_size: V, as padded.
        num_kv_heads: heads of keys and values, a divisor of a; 0 means a (no grouping).
        head_size: width of a head; 0 means h / a.
        ffn_size: width of the feed-forward part, with experts of each expert; 0 means 4 h.
        num_experts: E, experts of each layer; 0: none.
        experts_per_token: k, experts that compute each token, at most E.
        shared_expert_size: width of the expert that computes all tokens; 0: none.
        gated: whether the feed-forward part has a third matrix, as SwiGLU does.
        biases: whether linear layers and norms have biases.
        learned_positions: whether the model has a table of s positions.
        tied_embeddings: whether the output layer is the embedding.

    Raises:
        ValueError: a size is below 1, a number of heads does not divide, or the experts of a token are too many.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    sequence_length: int
    vocabulary_size: int
    num_kv_heads: int = 0
    head_size: int = 0
    ffn_size: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    shared_expert_size: int = 0
    gated: bool = False
    biases: bool = True
    learned_positions: bool = True
    tied_embeddings: bool = True

    def __post_init__(self) -> None:
        check_numbers(self, "num_layers", "hidden_size", "num_heads", "sequence_length", "vocabulary_size", least=1)
        optional = ("num_kv_heads", "head_size", "ffn_size", "num_experts", "experts_per_token", "shared_expert_size")
        check_numbers(self, *optional, least=0, expected="0 (the default) or more")
        self._check_experts()
        if not self.head_size and self.hidden_size % self.num_heads:
            raise ValueError(f"num_heads={self.num_heads}: expected a divisor of hidden_size={self.hidden_size}")
        if self.num_heads % self.kv_heads:
            raise ValueError(f"num_kv_heads={self.kv_heads}: expected a divisor of num_heads={self.num_heads}")

    def _check_experts(self) -> None:
        each = f"experts_per_token={self.experts_per_token}"
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(f"{each}: expected 1 to num_experts={self.num_experts}")
        if not self.num_experts and (self.experts_per_token or self.shared_expert_size):
            given = each if self.experts_per_token else f"shared_expert_size={self.shared_expert_size}"
            raise ValueError(f"{given}: expected num_experts above 0 with it")

    @property
    def kv_heads(self) -> int:
        """Heads of keys and of values."""
        return self.num_kv_heads or self.num_heads

    @property
    def ffn(self) -> int:
        """Width of the feed-forward part."""
        return self.ffn_size or 4 * self.hidden_size

    @property
    def kv_size(self) -> int:
        """Width of the keys, and of the values: h with a head of each per query head."""
        return (self.head_size or self.hidden_size // self.num_heads) * self.kv_heads

    @property
    def query_size(self) -> int:
        """Width of the queries, and of the output projection's input: h unless heads have another width."""
        return self.head_size * self.num_heads or self.hidden_size

    @property
    def ffn_matrices(self) -> int:
        """Matrices of a feed-forward part: up, (gate,) down."""
        return 3 if self.gated else 2

    @property
    def common_matrix_parameters(self) -> int:
        """Elements of one layer's matrices that all tokens use: all but those of experts."""
        attention = 2 * self.hidden_size * (self.query_size + self.kv_size)
        if not self.num_experts:
            return attention + self.ffn_matrices * self.hidden_size * self.ffn
        shared = self.ffn_matrices * self.hidden_size * self.shared_expert_size
        return attention + shared + self.hidden_size * self.num_experts

    @property
    def expert_matrix_parameters(self) -> int:
        """Elements of one expert's matrices, 0 without experts."""
        return self.ffn_matrices * self.hidden_size * self.ffn if self.num_experts else 0

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert of one layer, 0 without experts."""
        return self.expert_matrix_parameters + (self._ffn_biases if self.num_experts else 0)

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer without its experts, biases and its two norms included."""
        vectors = 2 * self.hidden_size  # the norms' scales
        if self.biases:
            # Both norms; queries, keys, values, output.
            vectors += 3 * self.hidden_size + self.query_size + 2 * self.kv_size
            vectors += 0 if self.num_experts else self._ffn_biases
        return self.common_matrix_parameters + vectors

    @property
    def _ffn_biases(self) -> int:
        """Of down, up and gate."""
        return self.hidden_size + self.ffn * (self.ffn_matrices - 1) if self.biases else 0

    @property
    def embedding_parameters(self) -> int:
        """Parameters before the first layer."""
        return (self.vocabulary_size + (self.sequence_length if self.learned_positions else 0)) * self.hidden_size

    @property
    def head_parameters(self) -> int:
        """Parameters after the last layer; with tied embeddings they are the embedding's."""
        return self.vocabulary_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """P, without the norm after the last layer, as in the paper."""
        untied = 0 if self.tied_embeddings else self.head_parameters
        layers = self.num_layers * (self.layer_parameters + self.num_experts * self.expert_parameters)
        return layers + self.embedding_parameters + untied

    def layer_matrix_flops(self, num_samples: int) -> int:
        """FLOPs of one layer's matrices, forward, for ``num_samples`` sequences."""
        used = self.common_matrix_parameters + self.experts_per_token * self.expert_matrix_parameters
        return 2 * num_samples * self.sequence_length * used

    def layer_attention_flops(self, num_samples: int) -> int:
        """FLOPs of one layer's two products of s x s, forward: 4 B s^2 h."""
        return 4 * num_samples * self.sequence_length**2 * self.query_size

    def head_flops(self, num_samples: int) -> int:
        """FLOPs of the output layer, forward: 2 B s h V."""
        return 2 * num_samples * self.sequence_length * self.head_parameters

    def step_flops(self, global_batch_size: int, recompute: Recompute = "none") -> int:
        """F: FLOPs of an optimizer step; with ``none`` those of the model, else those executed by the hardware.

        Args:
            global_batch_size: B, in samples.
            recompute: recomputation in the backward pass: none, the s x s part (selective), or whole layers (full).
        """
        matrices = self.layer_matrix_flops(global_batch_size)
        attention = self.layer_attention_flops(global_batch_size)
        again = {"none": 0, "selective": attention, "full": matrices + attention}[recompute]
        # A backward pass has two products for each one forward: gradients of the inputs and of the weights.
        return self.num_layers * (3 * (matrices + attention) + again) + 3 * self.head_flops(global_batch_size)


_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Equal nodes with equal accelerators, and a network that gives every accelerator the same share.

    Attributes:
        name: for messages.
        peak_flops: FLOP/s of matrix products by precision: ``bf16``, ``fp16``, ``tf32``, ``fp32``, ``fp8``.
        memory_bytes: memory of one accelerator.
        reserved_bytes: memory that is not available to the model: context, communication buffers, fragments.
        memory_bandwidth: bytes/s between an accelerator and its memory.
        accelerators_per_node: g.
        intra_bandwidth: bytes/s that an accelerator sends within its node.
        inter_bandwidth: bytes/s that an accelerator sends to another node, its share of the node's network.
        intra_latency_seconds: of one hop within a node.
        inter_latency_seconds: of one hop between nodes.

    Raises:
        ValueError: a value is out of range.
    """

    name: str
    peak_flops: Mapping[str, float] = field(hash=False)
    memory_bytes: int
    memory_bandwidth: float
    accelerators_per_node: int
    intra_bandwidth: float
    inter_bandwidth: float
    reserved_bytes: int = 4 * _GIB
    intra_latency_seconds: float = 5e-6
    inter_latency_seconds: float = 10e-6

    def __post_init__(self) -> None:
        object.__setattr__(self, "peak_flops", dict(self.peak_flops))
        if not self.peak_flops:
            raise ValueError("peak_flops={}: expected FLOP/s of at least one precision")
        for name, value in self.peak_flops.items():
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"peak_flops[{name!r}]={value!r}: expected a finite number above 0")
        positive = ("memory_bytes", "memory_bandwidth", "accelerators_per_node", "intra_bandwidth", "inter_bandwidth")
        check_numbers(self, *positive, above=0, expected="a finite number above 0")
        check_numbers(self, "reserved_bytes", "intra_latency_seconds", "inter_latency_seconds", least=0)
        if self.reserved_bytes >= self.memory_bytes:
            raise ValueError(f"reserved_bytes={self.reserved_bytes}: expected less than {self.memory_bytes}")

    @property
    def usable_bytes(self) -> int:
        """Memory of one accelerator that a task can fill."""
        return self.memory_bytes - self.reserved_bytes

    def peak(self, precision: str) -> float:
        """FLOP/s of one accelerator's matrix products.

        Raises:
            ValueError: the accelerator's figure for that precision is not known.
        """
        if precision not in self.peak_flops:
            known = ", ".join(sorted(self.peak_flops))
            raise ValueError(f"precision={precision!r} on {self.name}: expected one of {known}")
        return self.peak_flops[precision]


# "NVIDIA A100 Tensor Core GPU" data sheet (A100 80GB SXM): 312 TFLOP/s BF16 and FP16, 156 TF32, 19.5 FP32, 80 GB at
# 2,039 GB/s, NVLink 600 GB/s. Nodes of Selene: 8 accelerators, 8 HDR InfiniBand adapters of 200 Gb/s for applications
# (arXiv 2104.04473, section 5).
A100 = Hardware(
    name="A100-80GB-SXM",
    peak_flops={"bf16": 312e12, "fp16": 312e12, "tf32": 156e12, "fp32": 19.5e12},
    memory_bytes=80 * 10**9,
    memory_bandwidth=2.039e12,
    accelerators_per_node=8,
    intra_bandwidth=300e9,
    inter_bandwidth=25e9,
)
# The A100 with NVLink of 400 GB/s instead of 600 (NVIDIA's statement to Reuters of 7 November 2022).
A800 = replace(A100, name="A800-80GB-SXM", intra_bandwidth=200e9)
# "NVIDIA H100 Tensor Core GPU" data sheet (SXM): 989.4 TFLOP/s BF16 and FP16, 1,978.9 FP8, 494.7 TF32, 66.9 FP32, 80 GB
# at 3.35 TB/s, NVLink 900 GB/s. Nodes: arXiv 2407.21783, section 3.3: 8 accelerators, each with 400 Gb/s of network.
H100 = Hardware(
    name="H100-SXM",
    peak_flops={"bf16": 989.4e12, "fp16": 989.4e12, "fp8": 1978.9e12, "tf32": 494.7e12, "fp32": 66.9e12},
    memory_bytes=80 * 10**9,
    memory_bandwidth=3.35e12,
    accelerators_per_node=8,
    intra_bandwidth=450e9,
    inter_bandwidth=50e9,
)
# "NVIDIA H200 Tensor Core GPU" data sheet (SXM): as the H100, with 141 GB at 4.8 TB/s.
H200 = replace(H100, name="H200-SXM", memory_bytes=141 * 10**9, memory_bandwidth=4.8e12)

PRESETS: Mapping[str, Hardware] = MappingProxyType({"A100": A100, "A800": A800, "H100": H100, "H200": H200})


_ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp8": 2, "tf32": 4, "fp32": 4}


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Fractions of the peak that are reached.

    Attributes:
        matmul: of the peak FLOP/s, in matrix products.
        memory: of the memory's bandwidth, in all other operations.
        network: of the links' bandwidth, in collectives and between stages.

    Raises:
        ValueError: a fraction is out of range.
    """

    matmul: float
    memory: float
    network: float

    def __post_init__(self) -> None:
        for name in ("matmul", "memory", "network"):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise ValueError(f"{name}={value!r}: expected more than 0 and at most 1")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The training method.

    Attributes:
        efficiency: fractions of the hardware's peak.
        precision: of the matrix products; a key of `Cluster.peak_flops`.
        sequence_parallel: whether norms and dropouts are divided by TP too (Korthikanti et al. 2022).
        fused_attention: whether the s x s part never reaches memory and its masked half is skipped (FlashAttention).
        dropout: whether the model has dropouts, whose masks are kept.
        distributed_optimizer: whether the optimizer's state is divided over DP (ZeRO stage 1).
        overlap_gradients: whether data-parallel communication runs behind the last backward and the first forward.
        weight_bytes: per parameter: the weights used in matrix products.
        gradient_bytes: per parameter.
        optimizer_bytes: per parameter: fp32 weights and Adam's two moments.

    The default bytes are Megatron-Core's for bf16 with fp32 gradients: 18 per parameter, or 6 + 12/DP with the
    distributed optimizer (Megatron-Core developer guide, "Distributed Optimizer").

    Raises:
        ValueError: the precision is unknown, or bytes are negative.
    """

    efficiency: Efficiency
    precision: str = "bf16"
    sequence_parallel: bool = True
    fused_attention: bool = True
    dropout: bool = False
    distributed_optimizer: bool = True
    overlap_gradients: bool = True
    weight_bytes: int = 2
    gradient_bytes: int = 4
    optimizer_bytes: int = 12

    def __post_init__(self) -> None:
        if self.precision not in _ELEMENT_BYTES:
            expected = ", ".join(_ELEMENT_BYTES)
            raise ValueError(f"precision={self.precision!r}: expected one of {expected}")
        check_numbers(self, "weight_bytes", "gradient_bytes", "optimizer_bytes", least=0, expected="0 or more")

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of an activation."""
        return _ELEMENT_BYTES[self.precision]

    @property
    def attention_precision(self) -> str:
        """Precision of the s x s part and of the output layer, which stay at 16 bits under fp8."""
        return "bf16" if self.precision == "fp8" else self.precision


# Fitted to the seven forward and backward times of one layer of a 22-billion model on 8 A100 (Korthikanti et al. 2022,
# arXiv 2205.05198, table 4) with a root mean square error of 2 %. Nothing else is fitted. The same constants are used
# for every accelerator, which the published runs on H100 confirm. Prefer own measurements where they exist.
FITTED = Efficiency(matmul=0.69, memory=0.8, network=0.8)

# Megatron-LM of 2021 (arXiv 2104.04473), the same with sequence parallelism (arXiv 2205.05198), Megatron-Core of 2024.
MEGATRON_2021 = Recipe(
    efficiency=FITTED,
    precision="fp16",
    sequence_parallel=False,
    fused_attention=False,
    dropout=True,
    distributed_optimizer=False,
    overlap_gradients=False,
)
MEGATRON_2022 = replace(MEGATRON_2021, sequence_parallel=True)
MEGATRON_CORE = Recipe(efficiency=FITTED)

RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {"megatron-2021": MEGATRON_2021, "megatron-2022": MEGATRON_2022, "megatron-core": MEGATRON_CORE}
)


# Part of a step's time that each doubling of the number of nodes adds: stragglers, contention in the network, and what
# else the formulas leave out. Mean of published / predicted - 1 per doubling over free search on the MegaScale runs on
# A100 and NVIDIA's bf16 runs of 175B on H100 (0.026 and 0.006; tests/planner/performance/published.py).
SCALING_LOSS = 0.02


@dataclass(frozen=True, kw_only=True)
class TransformerProfile(ModelShape):
    """A transformer without measurements, as users describe it in files of ``unicron plan`` and ``unicron submit``.

    Raises:
        ValueError: a value is out of range, or a name is unknown.
    """

    global_batch_size: int
    """Samples per optimizer step."""
    micro_batch_size: int | None = None
    """Samples in a micro-batch, a divisor of the global batch; default: the fastest one."""
    context_parallel: int | None = None
    """CP, a divisor of the sequence's length; default: the fastest one, for a job 1."""
    expert_parallel: int | None = None
    """EP, a divisor of the experts; default: the fastest one."""
    accelerator: str | None = None
    """A800, A100, H100 or H200; default in a plan file: that of its cluster."""
    accelerators_per_node: int | None = None
    """Accelerators of a node, which TP never leaves; default: 8, in a plan file that of its cluster."""
    recipe: str = "megatron-core"
    """Training method: megatron-core, megatron-2022 or megatron-2021."""
    may_idle: bool = True
    """Whether the task may leave some of its workers idle."""
    uneven_shares: bool = False
    """Whether DP need not divide the global batch: replicas then get shares that differ by a micro-batch, as the
    strategies give them. More sizes are useful, and a lost replica does not change TP x PP.
    """
    scaling_loss: float = SCALING_LOSS
    """Part of a step's time that each doubling of the number of nodes adds to the formulas."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, "global_batch_size", "micro_batch_size", "accelerators_per_node", least=1)
        check_numbers(self, "context_parallel", "expert_parallel", least=1)
        check_numbers(self, "scaling_loss", least=0)
        if self.global_batch_size % (self.micro_batch_size or 1):
            given = f"micro_batch_size={self.micro_batch_size}"
            raise ValueError(f"{given}: expected a divisor of global_batch_size={self.global_batch_size}")
        if self.sequence_length % (self.context_parallel or 1):
            given = f"context_parallel={self.context_parallel}"
            raise ValueError(f"{given}: expected a divisor of sequence_length={self.sequence_length}")
        if max(1, self.num_experts) % (self.expert_parallel or 1):
            given = f"expert_parallel={self.expert_parallel}"
            raise ValueError(f"{given}: expected a divisor of num_experts={self.num_experts}")
        if self.accelerator is not None and self.accelerator not in PRESETS:
            raise ValueError(f"accelerator={self.accelerator!r}: expected one of {', '.join(sorted(PRESETS))}")
        if self.recipe not in RECIPES:
            raise ValueError(f"recipe={self.recipe!r}: expected one of {', '.join(sorted(RECIPES))}")

    @property
    def flops_per_step(self) -> int:
        """The model's FLOPs of one optimizer step."""
        return self.step_flops(self.global_batch_size)
