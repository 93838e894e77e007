"""Machines: the speed of an accelerator and of the network between accelerators and nodes.

The presets are the vendor's published figures, all without structured sparsity; each names its source. Bandwidths are
in one direction, of one accelerator, whereas NVIDIA gives the sum of both for NVLink. Two unpublished figures are
assumed: latencies, which matter little beside the bytes of large models, and memory that is not available to the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

GIB = 2**30


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
    reserved_bytes: int = 4 * GIB
    intra_latency_seconds: float = 5e-6
    inter_latency_seconds: float = 10e-6

    def __post_init__(self) -> None:
        object.__setattr__(self, "peak_flops", dict(self.peak_flops))
        if not self.peak_flops:
            raise ValueError("peak_flops={}: expected FLOP/s of at least one precision")
        positive = {f"peak_flops[{name!r}]": value for name, value in self.peak_flops.items()}
        for name in ("memory_bytes", "memory_bandwidth", "accelerators_per_node", "intra_bandwidth", "inter_bandwidth"):
            positive[name] = getattr(self, name)
        for name, value in positive.items():
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}={value!r}: expected a finite number above 0")
        for name in ("reserved_bytes", "intra_latency_seconds", "inter_latency_seconds"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}={value!r}: expected a finite number, 0 or more")
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
