"""The training method and its efficiency: the measured part of the model.

`Efficiency` holds the only fitted constants of the analytic model: the fractions of the hardware's peak that a program
reaches in matrix products, in everything bound by memory, and in communication. The values are fitted to published
measurements named beside them, and the tests state the errors of predictions for *other* published runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

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
        for name in ("weight_bytes", "gradient_bytes", "optimizer_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected 0 or more")

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
