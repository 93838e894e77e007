"""The schema of a file for ``unicron plan``: its keys, defaults, units and reasons.

`read` turns a YAML file and overrides into a `PlanConfig`. Unknown keys, missing ones and wrong types are refused with
the key's full name and the expected value.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from unicron_lightning.errors import ConfigError
from unicron_lightning.planner.performance.transformer import SCALING_LOSS
from unicron_lightning.planner.placement import NodeState
from unicron_lightning.sections import read_section, read_yaml


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """One node."""

    num_accelerators: int | None = None
    """Number of its accelerators; default: `PlanClusterConfig.workers_per_node`."""
    state: NodeState = "ready"
    """Only ready nodes are planned with. Workers on other nodes count as lost."""


@dataclass(frozen=True, kw_only=True)
class PlanClusterConfig:
    """The machines: a number of equal nodes, nodes by name, or both, where named nodes differ from the equal ones."""

    num_nodes: int = 0
    """Equal nodes, named node0, node1, ..., with leading zeros where needed."""
    nodes: dict[str, NodeConfig] = field(default_factory=dict)
    """Nodes by name. A name of an equal node replaces that one."""
    workers_per_node: int = 8
    """Accelerators of a node."""
    unit: int = 1
    """Workers that are allocated together; the value of workers_per_node allocates whole nodes."""
    accelerator: str | None = None
    """A800, A100, H100 or H200; only needed for tasks with `PerformanceConfig.transformer`."""


@dataclass(frozen=True, kw_only=True)
class FailuresConfig:
    """Failure rates. An MTBF is that of one worker, or of one node. At least one of them is needed."""

    worker_mtbf_hours: float | None = None
    """Worker-hours per failure of a single worker."""
    node_mtbf_hours: float | None = None
    """Node-hours per failure of a whole node."""
    worker_failures: int = 0
    """Failures of workers observed in `worker_hours`, which correct the MTBF as the prior."""
    worker_hours: float = 0.0
    """Observed hours of workers, summed over all of them."""
    node_failures: int = 0
    node_hours: float = 0.0
    worker_shape: float = 1.0
    """Weibull shape of workers' lifetimes, ages in equilibrium: 1 for a constant rate, less for burn-in, more
    for wear.
    """
    node_shape: float = 1.0
    prior_failures: float = 1.0
    """Weight of the MTBFs against observations, in failures."""


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """A transformer without measurements; see `unicron_lightning.planner.performance.description.ModelShape`."""

    num_layers: int
    hidden_size: int
    num_heads: int
    sequence_length: int
    vocabulary_size: int
    global_batch_size: int
    """Samples per optimizer step."""
    num_kv_heads: int = 0
    ffn_size: int = 0
    gated: bool = False
    biases: bool = True
    learned_positions: bool = True
    tied_embeddings: bool = True
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


@dataclass(frozen=True, kw_only=True)
class PerformanceConfig:
    """T(t,x), in exactly one way."""

    flops: dict[int, float] | None = None
    """Workers -> achieved aggregate FLOP/s."""
    points: list[dict[str, Any]] | None = None
    """Rows with the columns of `unicron_lightning.planner.performance.model`."""
    csv: str | None = None
    """A file with such rows; its path is relative to the folder of the YAML file."""
    transformer: TransformerConfig | None = None
    measured: list[dict[str, Any]] | None = None
    """A few measured rows that correct the ``transformer``: `unicron_lightning.planner.performance.calibrated`."""
    flops_per_step: float | None = None
    """FLOPs of one optimizer step, for rows that give step_seconds."""
    between: Literal["stair", "linear"] = "stair"
    beyond: Literal["hold", "extend"] = "hold"

    def __post_init__(self) -> None:
        ways = ("flops", "points", "csv", "transformer")
        given = [way for way in ways if getattr(self, way) is not None]
        if len(given) != 1:
            raise ConfigError(f"given by {', '.join(given) or 'nothing'}: expected exactly one of {', '.join(ways)}")
        if self.measured is not None and self.transformer is None:
            raise ConfigError(f"measured with {given[0]}: expected it with transformer, which it corrects")


@dataclass(frozen=True, kw_only=True)
class PlanTaskConfig:
    """A task; see `unicron_lightning.planner.reward.PlanTask`."""

    performance: PerformanceConfig
    transition_seconds: float = field(
        metadata={
            "example": "30: the time that a change of its workers costs the task, measured by `unicron incidents`"
        }
    )
    """D_transition: the time that a change of its workers costs the task."""
    relayout_seconds: float = 0.0
    """Further time if the change is to another TP x PP: a checkpoint, and the restart of all workers."""
    weight: float = 1.0
    min_workers: int = 1
    max_workers: int | None = None
    granularity: int = 1
    may_pause: bool | None = None
    """Whether the plan may give it no workers in favour of others; default: unless `PlanConfig.fair` is ``min``."""
    workers: int | None = None
    """The task's present workers, if their nodes are unknown; a placement of them is then assumed."""
    accelerators: dict[str, int] = field(default_factory=dict)
    """Node -> the task's present workers on it, including those on failed nodes."""
    group_size: int | None = None
    """Workers that should share a node; default: TP of the configuration, if known. Only reported."""
    replica_size: int | None = None
    """Workers of one replica, which should share a node if they fit on one; default: TP x PP. Only reported."""

    def __post_init__(self) -> None:
        if self.workers is not None and self.accelerators:
            raise ConfigError("workers and accelerators: expected only one of them")
        if (self.workers or 0) < 0 or any(num < 0 for num in self.accelerators.values()):
            raise ConfigError(f"workers={self.workers}, accelerators={self.accelerators}: expected numbers >= 0")


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """The whole file."""

    cluster: PlanClusterConfig
    failures: FailuresConfig
    tasks: dict[str, PlanTaskConfig]
    queued: dict[str, PlanTaskConfig] = field(default_factory=dict)
    """Tasks that are not to run yet, for --what-if launch."""
    fair: Literal["none", "min"] = "none"
    """``min``: a task that does not state ``may_pause`` keeps its minimum of workers."""
    caution: float = 0.0
    """Standard errors by which the plan takes every T(t,x) to be less than predicted; 0: as predicted."""


def read(path: Path, overrides: list[str]) -> PlanConfig:
    """Read a file.

    Args:
        path: the YAML file.
        overrides: ``key=value`` with dots in the key, e.g. ``tasks.gpt.weight=2``.

    Raises:
        ConfigError: the file cannot be read, or contradicts the schema.
    """
    return read_section(PlanConfig, read_yaml(path, overrides, "cluster, failures and tasks"), "")
