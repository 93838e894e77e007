"""Files for ``unicron plan``, and the planner's input made from them: the state, the nodes, and the running workers.

`read` turns a YAML file and overrides into a `PlanConfig`. Unknown keys, missing ones and wrong types are refused with
the key's full name and the expected value.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from unicron_lightning.errors import ConfigError
from unicron_lightning.planner.failures import (
    SECONDS_PER_HOUR,
    ConstantHazard,
    FailureModel,
    Hazard,
    RateBelief,
    WeibullHazard,
)
from unicron_lightning.planner.fleet import Fleet, FleetPlan, Quota
from unicron_lightning.planner.performance.calibrated import CalibratedModel, Measurement
from unicron_lightning.planner.performance.description import PRESETS, TransformerProfile
from unicron_lightning.planner.performance.model import (
    MeasuredTable,
    PerformanceModel,
    points_from_csv,
    points_from_rows,
)
from unicron_lightning.planner.performance.transformer import TransformerModel
from unicron_lightning.planner.placement import Accelerators, Demand, NodeCapacity, NodeState, Placement, place
from unicron_lightning.planner.reward import Curve, PlanTask
from unicron_lightning.planner.solver import TaskPlan
from unicron_lightning.planner.state import ClusterState
from unicron_lightning.sections import read_section, read_yaml
from unicron_lightning.terms import Terms


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """One node."""

    num_accelerators: int | None = None
    """Number of its accelerators; default: `PlanClusterConfig.workers_per_node`."""
    state: NodeState = "ready"
    """Only ready nodes are planned with. Workers on other nodes count as lost."""
    kind: str | None = None
    """Kind of its accelerators; default: `PlanClusterConfig.kind`."""
    island: str = ""
    """Its NVLink domain or rack, inside which replicas are placed where possible; default: the node alone."""


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
    kind: str = ""
    """Kind of the accelerators of nodes that do not state theirs."""
    accelerators: dict[str, str] = field(default_factory=dict)
    """Kind -> its `accelerator`; default: the one that is part of the kind's name, as in ``NVIDIA-H100-80GB-HBM3``."""

    @property
    def kinds(self) -> list[str]:
        """The kinds of all nodes, and those that are named without nodes."""
        named = {self.kind if node.kind is None else node.kind for node in self.nodes.values()}
        return sorted({*named, *self.accelerators, *([self.kind] if self.num_nodes > 0 else [])})


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
class PerformanceConfig:
    """T(t,x), in exactly one way."""

    kinds: dict[str, PerformanceConfig] | None = None
    """T(t,x) on each kind of accelerators on which the task can run."""

    flops: dict[int, float] | None = None
    """Workers -> achieved aggregate FLOP/s."""
    points: list[dict[str, Any]] | None = None
    """Rows with the columns of `unicron_lightning.planner.performance.model`."""
    csv: str | None = None
    """A file with such rows; its path is relative to the folder of the YAML file."""
    transformer: TransformerProfile | None = None
    measured: list[dict[str, Any]] | None = None
    """A few measured rows that correct the ``transformer``: `unicron_lightning.planner.performance.calibrated`."""
    flops_per_step: float | None = None
    """FLOPs of one optimizer step, for rows that give step_seconds."""
    between: Literal["stair", "linear"] = "stair"
    beyond: Literal["hold", "extend"] = "hold"

    def __post_init__(self) -> None:
        ways = ("flops", "points", "csv", "transformer", "kinds")
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
    kind: str | None = None
    """Kind of the ``workers``; only needed if the cluster has several."""
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
class QuotaConfig:
    """Workers of several tasks together; see `unicron_lightning.planner.fleet.Quota`."""

    tasks: list[str]
    guaranteed: int = 0
    most: int | None = None


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """The whole file."""

    cluster: PlanClusterConfig
    failures: FailuresConfig
    tasks: dict[str, PlanTaskConfig]
    queued: dict[str, PlanTaskConfig] = field(default_factory=dict)
    """Tasks that are not to run yet, for --what-if launch."""
    quotas: dict[str, QuotaConfig] = field(default_factory=dict)
    """By name, groups of tasks with a guaranteed number of workers and a limit."""
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


@dataclass(frozen=True, kw_only=True)
class Situation:
    """The planner's input.

    Attributes:
        fleet: the planned situation.
        nodes: all nodes.
        running: node -> task -> present workers.
        assumed: whether the file contains numbers of workers without their nodes.
        config: the file's definition of each task, including queued ones.
    """

    fleet: Fleet
    nodes: tuple[NodeCapacity, ...]
    running: Accelerators
    assumed: bool
    config: Mapping[str, PlanTaskConfig]

    def place(self, plan: FleetPlan) -> Placement:
        """Place a plan's workers."""
        return place(self.nodes, [self._demand(part) for part in plan.tasks], self.running)

    def _demand(self, part: TaskPlan) -> Demand:
        layout, config = part.configuration, self.config[part.name]
        group = config.group_size or (layout.tensor_parallel if layout else 1)
        replica = config.replica_size or (layout.replica_size if layout else group)
        islands = Counter[str]()
        for node in self.nodes:
            islands[node.island or f"/{node.name}"] += node.num_accelerators
        largest = max((node.num_accelerators for node in self.nodes), default=0)
        return Demand(
            task=part.name,
            num_workers=part.num_workers,
            together=replica if replica <= largest else group,
            kind=part.kind,
            in_island=replica if replica <= max(islands.values(), default=0) else group,
        )


def situation_of(config: PlanConfig, folder: Path) -> Situation:
    """Build the situation.

    Args:
        config: the file.
        folder: base of relative paths in the file.

    Raises:
        ConfigError: values contradict each other, or a table cannot be read.
    """
    if config.fair == "min":
        config = dataclasses.replace(config, tasks=_fair(config.tasks), queued=_fair(config.queued))
    twice = sorted(config.tasks.keys() & config.queued.keys())
    if twice:
        raise ConfigError(f"queued.{twice[0]}: also in tasks; expected a task in one of them")
    if not config.tasks and not config.queued:
        raise ConfigError("tasks: {}: expected at least one task in tasks or queued")
    nodes = nodes_of(config.cluster)
    names = {node.name for node in nodes}
    for name, task in config.tasks.items():
        unknown = sorted(task.accelerators.keys() - names)
        if unknown:
            raise ConfigError(f"tasks.{name}.accelerators.{unknown[0]}: no such node, expected one of the cluster's")
    homes = {name: _home(name, task, config.cluster, nodes) for name, task in config.tasks.items()}
    hazards = failure_model(config.failures, config.cluster.workers_per_node)
    try:
        kinds = {kind: _state(config, kind, nodes, homes, folder) for kind in config.cluster.kinds}
        fleet = Fleet(kinds=kinds, running_seconds=hazards.running_seconds, quotas=_quotas(config))
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error
    running, assumed = _running(config, nodes, homes)
    return Situation(
        fleet=fleet, nodes=nodes, running=running, assumed=assumed, config={**config.tasks, **config.queued}
    )


def _quotas(config: PlanConfig) -> tuple[Quota, ...]:
    known = sorted({**config.tasks, **config.queued})
    for name, quota in config.quotas.items():
        if unknown := [task for task in quota.tasks if task not in known]:
            raise ConfigError(f"quotas.{name}.tasks: no task {unknown[0]!r}: expected some of {', '.join(known)}")
    return tuple(
        Quota(name=name, tasks=tuple(quota.tasks), guaranteed=quota.guaranteed, most=quota.most)
        for name, quota in config.quotas.items()
    )


def _home(name: str, task: PlanTaskConfig, cluster: PlanClusterConfig, nodes: tuple[NodeCapacity, ...]) -> str:
    """The kind on which a task runs; the cluster's only one or the first if it does not run."""
    kinds = cluster.kinds
    held = sorted({node.kind for node in nodes if task.accelerators.get(node.name)})
    if len(held) > 1:
        raise ConfigError(f"tasks.{name}.accelerators: on nodes of kinds {', '.join(held)}: expected nodes of one kind")
    if task.kind is not None and task.kind not in (held or kinds):
        raise ConfigError(f"tasks.{name}.kind={task.kind!r}: expected one of {', '.join(held or kinds)}")
    if task.workers and task.kind is None and len(kinds) > 1:
        raise ConfigError(f"tasks.{name}.kind is missing: expected the kind of its workers, one of {', '.join(kinds)}")
    return task.kind or (held or kinds)[0]


def _state(
    config: PlanConfig, kind: str, nodes: tuple[NodeCapacity, ...], homes: Mapping[str, str], folder: Path
) -> ClusterState:
    """The workers of one kind, and the tasks that can run on them."""
    cluster = config.cluster
    ready = {node.name: node for node in nodes if node.state == "ready" and node.kind == kind}
    num_workers = sum(node.num_accelerators for node in ready.values())

    def curves(tasks: Mapping[str, PlanTaskConfig], where: str) -> tuple[Curve, ...]:
        made = (task_of(name, task, where, cluster, folder, config.caution, kind) for name, task in tasks.items())
        reach = num_workers + cluster.workers_per_node
        return tuple(Curve.of(task, cluster.unit, reach) for task in made if task is not None)

    own = {name: task for name, task in config.tasks.items() if homes[name] == kind}
    lost = {name: _lost(task, set(ready)) for name, task in own.items()}
    return ClusterState(
        tasks=curves(config.tasks, "tasks"),
        queued=curves(config.queued, "queued"),
        num_workers=num_workers,
        running_seconds=1.0,  # the fleet has that of all kinds
        allocation={name: _workers(task) for name, task in own.items()},
        lost={name: num for name, num in lost.items() if num},
        unit=cluster.unit,
        node_workers=cluster.workers_per_node,
    )


def nodes_of(config: PlanClusterConfig) -> tuple[NodeCapacity, ...]:
    """All nodes, the equal ones first."""
    for name, least in (("workers_per_node", 1), ("unit", 1), ("num_nodes", 0)):
        if getattr(config, name) < least:
            raise ConfigError(f"cluster.{name}={getattr(config, name)}: expected a whole number of at least {least}")
    digits = len(str(max(config.num_nodes - 1, 0)))
    nodes = {}
    for index in range(config.num_nodes):
        name = f"node{index:0{digits}}"
        nodes[name] = NodeCapacity(name=name, num_accelerators=config.workers_per_node, kind=config.kind)
    for name, node in config.nodes.items():
        num_accelerators = config.workers_per_node if node.num_accelerators is None else node.num_accelerators
        if num_accelerators < 0:
            raise ConfigError(f"cluster.nodes.{name}.num_accelerators={num_accelerators}: expected a number >= 0")
        kind = config.kind if node.kind is None else node.kind
        if not kind and len(config.kinds) > 1:
            raise ConfigError(f"cluster.nodes.{name}.kind is missing: expected a kind, which other nodes have")
        nodes[name] = NodeCapacity(
            name=name, num_accelerators=num_accelerators, state=node.state, kind=kind, island=node.island
        )
    if not nodes:
        raise ConfigError(f"cluster.num_nodes={config.num_nodes}: expected at least 1, or nodes by name")
    return tuple(nodes.values())


def failure_model(config: FailuresConfig, workers_per_node: int) -> FailureModel:
    """Hazards of workers and nodes: the given MTBFs, corrected by observations."""
    hazards: dict[str, Hazard] = {}
    for kind in ("worker", "node"):
        hours = getattr(config, f"{kind}_mtbf_hours")
        failures, exposure = getattr(config, f"{kind}_failures"), getattr(config, f"{kind}_hours")
        if hours is None:
            if failures or exposure:
                raise ConfigError(
                    f"failures.{kind}_mtbf_hours is missing: expected the MTBF assumed before the observations"
                )
            continue
        if not (math.isfinite(hours) and hours > 0):
            raise ConfigError(f"failures.{kind}_mtbf_hours={hours:g}: expected hours > 0")
        try:
            belief = RateBelief.from_mtbf(hours * SECONDS_PER_HOUR, num_failures=config.prior_failures)
            seen = belief.observed(num_failures=failures, exposure_seconds=exposure * SECONDS_PER_HOUR)
            hazards[kind] = _with_shape(seen.hazard(), getattr(config, f"{kind}_shape"))
        except ValueError as error:
            raise ConfigError(f"failures: {kind}_mtbf_hours={hours}: {error}") from error
    if not hazards:
        raise ConfigError("failures: expected worker_mtbf_hours, node_mtbf_hours, or both")
    return FailureModel(worker=hazards.get("worker"), node=hazards.get("node"), workers_per_node=workers_per_node)


def _with_shape(hazard: ConstantHazard, shape: float) -> Hazard:
    """An age-dependent hazard with the same mean lifetime."""
    if shape == 1:
        return hazard
    if not shape > 0:
        raise ValueError(f"shape={shape}: expected a number > 0")
    scale_seconds = hazard.mean_lifetime_seconds / math.gamma(1 + 1 / shape)
    return WeibullHazard(shape=shape, scale_seconds=scale_seconds)


def _fair(tasks: Mapping[str, PlanTaskConfig]) -> dict[str, PlanTaskConfig]:
    """Return the tasks with ``fair: min`` applied."""
    return {
        name: dataclasses.replace(task, may_pause=False) if task.may_pause is None else task
        for name, task in tasks.items()
    }


def task_of(
    name: str,
    config: PlanTaskConfig,
    where: str,
    cluster: PlanClusterConfig,
    folder: Path,
    caution: float = 0.0,
    kind: str = "",
) -> PlanTask | None:
    """A task with its performance model on a kind of accelerators; None if it cannot run on it."""
    try:
        performance = _on_kind(config.performance, cluster, kind)
        if performance is None:
            return None
        return PlanTask(
            name=name,
            performance=performance_of(performance, cluster, folder, kind),
            transition_seconds=config.transition_seconds,
            relayout_seconds=config.relayout_seconds,
            terms=Terms.of(config, may_pause=config.may_pause is not False),
            caution=caution,
        )
    except ValueError as error:
        raise ConfigError(f"{where}.{name}: {error}") from error


def _on_kind(config: PerformanceConfig, cluster: PlanClusterConfig, kind: str) -> PerformanceConfig | None:
    """The part that is for a kind; None without one."""
    kinds = cluster.kinds
    if config.kinds is not None:
        if unknown := sorted(config.kinds.keys() - set(kinds)):
            known = ", ".join(filter(None, kinds)) or "none: no node of the cluster states its kind"
            raise ConfigError(f"performance.kinds.{unknown[0]}: no such kind, expected those of the cluster, {known}")
        return config.kinds.get(kind)
    fixed = config.transformer is None or config.transformer.accelerator is not None or config.measured is not None
    if len(kinds) > 1 and fixed:
        given = f"performance: one for accelerators of kinds {', '.join(kinds)}"
        raise ConfigError(f"{given}: expected kinds, or transformer without accelerator and measured")
    return config


def performance_of(
    config: PerformanceConfig, cluster: PlanClusterConfig, folder: Path, kind: str = ""
) -> PerformanceModel:
    """T(t,x) as defined by a file.

    Raises:
        ValueError: the table or the model is invalid.
    """
    if config.kinds is not None:
        raise ConfigError("performance.kinds: expected T(t,x) for one kind of accelerators")
    if config.transformer is not None:
        prior = _transformer(config.transformer, cluster, kind)
        return prior if config.measured is None else _calibrated(prior, config)
    if config.csv is None:
        rows = config.points or [{"workers": x, "flops_per_second": rate} for x, rate in (config.flops or {}).items()]
        points = points_from_rows(rows, flops_per_step=config.flops_per_step)
    else:
        try:
            text = (folder / config.csv).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"csv={config.csv}: {error}") from error
        points = points_from_csv(text, flops_per_step=config.flops_per_step)
    return MeasuredTable(points=points, between=config.between, beyond=config.beyond)


def _transformer(profile: TransformerProfile, cluster: PlanClusterConfig, kind: str) -> TransformerModel:
    given = profile.accelerator or cluster.accelerators.get(kind) or cluster.accelerator
    named = [word for word in re.split(r"[^A-Z0-9]+", kind.upper()) if word in PRESETS]
    accelerator = given or next(iter(named), None)
    if accelerator is None or accelerator not in PRESETS:
        key = f"accelerators.{kind}" if kind else "accelerator"
        raise ConfigError(f"cluster.{key}={accelerator}: expected one of {', '.join(sorted(PRESETS))}")
    return TransformerModel.of(profile, accelerator=accelerator, accelerators_per_node=cluster.workers_per_node)


def _calibrated(prior: TransformerModel, config: PerformanceConfig) -> CalibratedModel:
    """Correct the analytic model by a file's measured rows."""
    rows, flops_per_step = config.measured or [], config.flops_per_step or float(prior.step_flops)
    table = MeasuredTable(points=points_from_rows(rows, flops_per_step=flops_per_step))
    measured = {
        row.num_workers: Measurement(flops_per_second=row.flops_per_second, configuration=row.configuration)
        for row in table.points
    }
    return CalibratedModel(prior=prior, measured=measured)


def _workers(task: PlanTaskConfig) -> int:
    return sum(task.accelerators.values()) if task.accelerators else task.workers or 0


def _lost(task: PlanTaskConfig, usable: set[str]) -> int:
    return sum(num for node, num in task.accelerators.items() if node not in usable)


def _running(
    config: PlanConfig, nodes: tuple[NodeCapacity, ...], homes: Mapping[str, str]
) -> tuple[Accelerators, bool]:
    """Present workers by node and task; workers without a known node are placed beside the others."""
    running: dict[str, dict[str, int]] = {}
    for task, each in config.tasks.items():
        for node, num in each.accelerators.items():
            running.setdefault(node, {})[task] = num
    loose = {name: each.workers for name, each in config.tasks.items() if each.workers}
    if not loose:
        return running, False
    known = [
        Demand(task=name, num_workers=sum(each.accelerators.values()), kind=homes[name])
        for name, each in config.tasks.items()
        if each.accelerators and name not in loose
    ]
    demands = [Demand(task=name, num_workers=num or 0, kind=homes[name]) for name, num in loose.items()]
    try:
        return place(nodes, [*known, *demands], running).accelerators, True
    except ValueError as error:
        raise ConfigError(f"tasks: {error}") from error
