"""One simulation as composed by Hydra, validated, and run: a cluster, its tasks, a trace, costs and a policy.

This module has the schema of the groups ``workload`` and ``cluster``. A task's speed is given as in files for ``unicron
plan``, and such a file can be a workload.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal

from unicron_lightning.cli.plan.situation import PerformanceConfig, PlanClusterConfig, nodes_of, performance_of, read
from unicron_lightning.coordinator.config import CoordinatorConfig, DetectionConfig, SeverityConfig
from unicron_lightning.coordinator.events import Limits
from unicron_lightning.errors import ConfigError, check_numbers
from unicron_lightning.planner.performance.model import PerformanceModel
from unicron_lightning.planner.performance.transformer import TransformerModel
from unicron_lightning.sections import read_section
from unicron_lightning.simulate.costs import Calibration, Costs, read_calibration
from unicron_lightning.simulate.healing import Healing
from unicron_lightning.simulate.policy import SYSTEMS, Policy
from unicron_lightning.simulate.result import SimulationResult
from unicron_lightning.simulate.trace import SimCluster, SimTask, Trace
from unicron_lightning.simulate.traces import TraceConfig, generate
from unicron_lightning.simulate.unicron_system import ABLATIONS, System
from unicron_lightning.terms import Terms

HOUR = 3600.0
_SCENES: dict[tuple[str, str, Path], tuple[SimCluster, tuple[SimTask, ...]]] = {}
"""The newest scene, shared by the jobs of a sweep. A table in a CSV file stays as it was first read."""


@dataclass(frozen=True, kw_only=True)
class SizeConfig:
    """The cluster; null values are taken from the workload."""

    num_nodes: int | None = None
    """Number of equal nodes."""
    workers_per_node: int | None = None
    """Accelerators of each node."""
    cell: int | None = None
    """Nodes that are allocated, and lost, together; see `unicron_lightning.simulate.trace.SimCluster`."""
    accelerator: str | None = None
    """A800, A100, H100 or H200, for tasks with ``performance.transformer``."""
    storage_gigabytes_per_second: float | None = None
    """Shared storage's bandwidth: checkpoints of tasks of known size take that long instead of `costs.common.load`."""
    peer_gigabytes_per_second: float | None = None
    """A worker's bandwidth for state from a peer, instead of `costs.common.state`."""


@dataclass(frozen=True, kw_only=True)
class _SimTaskConfig:
    """A task; see `unicron_lightning.simulate.trace.SimTask`."""

    performance: PerformanceConfig
    """T(t,x), as in a file for ``unicron plan``."""
    weight: float = 1.0
    min_workers: int = 1
    max_workers: int | None = None
    quantum: int = 1
    """Number that its workers are a multiple of, e.g. TP x PP."""
    flops_per_step: float | None = None
    """FLOPs of an optimizer step; known for a ``transformer``."""
    arrival_hours: float = 0.0
    departure_hours: float | None = None
    steps: float | None = None
    """Steps after which it ends."""
    state_gigabytes: float | None = None
    """Parameters and optimizer state of a replica; null: 14 bytes per parameter of a ``transformer``, else unknown."""
    copies: int = 1
    """Number of equal tasks, named NAME-0, NAME-1, ..."""
    stagger_hours: float = 0.0
    """Hours between the arrivals of consecutive copies."""

    def __post_init__(self) -> None:
        check_numbers(self, "copies", "quantum", least=1, error=ConfigError)
        check_numbers(self, "stagger_hours", least=0, expected="hours, 0 or more", error=ConfigError)


@dataclass(frozen=True, kw_only=True)
class WorkloadConfig:
    """Tasks, and the cluster that they are for."""

    name: str
    """Name for tables."""
    cluster: SizeConfig = field(default_factory=SizeConfig)
    tasks: dict[str, _SimTaskConfig] = field(default_factory=dict)
    file: str | None = None
    """A file for ``unicron plan``: its tasks, except queued ones, and its cluster."""


def scene(workload: WorkloadConfig, size: SizeConfig, folder: Path = Path()) -> tuple[SimCluster, tuple[SimTask, ...]]:
    """Create the cluster and its tasks. Those of a file are read each time; others are cached, as models search long.

    Args:
        workload: the tasks and their cluster.
        size: overrides of the cluster.
        folder: base of relative paths.

    Raises:
        ConfigError: something is missing, or values contradict each other.
    """
    known = None if workload.file is not None else (repr(workload), repr(size), folder)
    if known is not None and known in _SCENES:
        return _SCENES[known]
    made = _scene(workload, size, folder)
    if known is not None:
        _SCENES.clear()
        _SCENES[known] = made
    return made


def _scene(workload: WorkloadConfig, size: SizeConfig, folder: Path) -> tuple[SimCluster, tuple[SimTask, ...]]:
    own, tasks, base = workload.cluster, dict(workload.tasks), folder
    if workload.file is not None:
        base = folder / Path(workload.file).parent
        plan = read(folder / workload.file, [])
        nodes = nodes_of(plan.cluster)
        if len({node.num_accelerators for node in nodes}) > 1:
            raise ConfigError(f"workload.file={workload.file}: nodes of several sizes: expected equal ones")
        own = SizeConfig(
            num_nodes=len(nodes), workers_per_node=nodes[0].num_accelerators, accelerator=plan.cluster.accelerator
        )
        for name, task in plan.tasks.items():
            tasks[name] = _SimTaskConfig(
                performance=task.performance,
                weight=task.weight,
                min_workers=task.min_workers,
                max_workers=task.max_workers,
                quantum=task.granularity,
            )
    cluster = _cluster(own, size)
    if not tasks:
        raise ConfigError("workload: no tasks: expected at least one in workload.tasks or workload.file")
    accelerator = size.accelerator or own.accelerator
    machines = PlanClusterConfig(
        num_nodes=cluster.num_nodes, workers_per_node=cluster.workers_per_node, accelerator=accelerator
    )
    made = [each for name, task in tasks.items() for each in _tasks(name, task, machines, base)]
    return cluster, tuple(made)


def _cluster(own: SizeConfig, size: SizeConfig) -> SimCluster:
    given = {each.name: getattr(own, each.name) for each in fields(SizeConfig)}
    given.update(
        {name: value for each in fields(SizeConfig) if (value := getattr(size, name := each.name)) is not None}
    )
    del given["accelerator"]
    if given["num_nodes"] is None or given["workers_per_node"] is None:
        said = f"num_nodes={given['num_nodes']}, workers_per_node={given['workers_per_node']}"
        raise ConfigError(f"cluster: {said}: expected both, there or in workload.cluster")
    try:
        return SimCluster(**{**given, "cell": 1 if given["cell"] is None else given["cell"]})
    except ConfigError as error:
        raise ConfigError(f"cluster.{error}") from error


def _tasks(name: str, config: _SimTaskConfig, machines: PlanClusterConfig, folder: Path) -> Iterator[SimTask]:
    where = f"workload.tasks.{name}"
    try:
        performance = performance_of(config.performance, machines, folder)
    except ValueError as error:
        raise ConfigError(f"{where}.performance: {error}") from error
    flops = _step_flops(config, performance, where)
    for copy in range(config.copies):
        late = copy * config.stagger_hours
        yield SimTask(
            name=name if config.copies == 1 else f"{name}-{copy}",
            performance=performance,
            flops_per_step=flops,
            terms=Terms.of(config, granularity=config.quantum, may_pause=True),
            arrival=(config.arrival_hours + late) * HOUR,
            departure=None if config.departure_hours is None else (config.departure_hours + late) * HOUR,
            steps=config.steps,
            state_gigabytes=_state_gigabytes(config, performance),
            step_samples=None if (shape := config.performance.transformer) is None else shape.global_batch_size,
        )


def _state_gigabytes(config: _SimTaskConfig, performance: PerformanceModel) -> float | None:
    if config.state_gigabytes is None and isinstance(performance, TransformerModel):
        return 14e-9 * performance.shape.num_parameters  # 16-bit parameters; 32-bit parameters and Adam's two moments
    return config.state_gigabytes


def _step_flops(config: _SimTaskConfig, performance: PerformanceModel, where: str) -> float:
    flops = config.flops_per_step or config.performance.flops_per_step
    if flops is not None:
        return flops
    if isinstance(performance, TransformerModel):
        return float(performance.step_flops)
    # This sets only the length of a step, and so the loss with a worker: assume 10 s at the smallest size.
    least = performance.throughput(max(config.min_workers, config.quantum))
    if not least:
        raise ConfigError(f"{where}: T(t,x)=0 at min_workers={config.min_workers}: expected FLOP/s > 0")
    return 10.0 * least


Format = Literal["csv", "parquet"]


@dataclass(frozen=True, kw_only=True)
class _OutputConfig:
    """Output of a simulation."""

    format: Format = "csv"
    """Format of tables; parquet needs pyarrow."""
    pictures: bool = True
    """Whether to draw pictures, if matplotlib is installed."""
    progress: bool = True
    """Whether sweeps show a progress bar, on a terminal."""
    reference: str = "megatron"
    """The policy that others are compared with."""
    columns: list[str] = field(default_factory=list)
    """Further columns of the tables: some of `unicron_lightning.simulate.output.FURTHER`."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One simulation.

    Attributes:
        policy: one of `run.POLICIES`, or MODULE.CLASS of a user's own.
        seed: seed of the trace.
        trace, workload, cluster, costs: the groups.
        severity, detection: groups of the coordinator's configuration, for Unicron's policies.
        output: its output.
    """

    policy: str
    seed: int
    trace: TraceConfig
    workload: WorkloadConfig
    cluster: SizeConfig
    costs: Calibration
    severity: SeverityConfig
    detection: DetectionConfig
    output: _OutputConfig = field(default_factory=_OutputConfig)

    def scene(self, folder: Path = Path()) -> tuple[SimCluster, tuple[SimTask, ...], Trace]:
        """Return cluster, tasks and trace; relative paths begin at ``folder``."""
        cluster, tasks = scene(self.workload, self.cluster, folder)
        return cluster, tasks, generate(self.trace, cluster, self.seed, folder)

    def run(self, folder: Path = Path()) -> SimulationResult:
        """Simulate.

        Raises:
            ConfigError: values that contradict each other.
        """
        cluster, tasks, trace = self.scene(folder)
        limits = CoordinatorConfig(severity=self.severity, detection=self.detection).limits()
        return simulate(self.policy, cluster, tasks, trace, self.costs.of(system_of(self.policy)), limits)


def read_settings(data: Mapping[str, Any]) -> Settings:
    """Read composed settings from plain data.

    Raises:
        ConfigError: an unknown or missing key, or a wrong value, with the full key.
    """
    known = ("policy", "seed", "trace", "workload", "cluster", "costs", "severity", "detection", "output")
    for key in data:
        if key not in (*known, "experiment"):
            raise ConfigError(f"{key}={data[key]!r}: unknown key, expected one of {', '.join(known)}")
    policy, seed = str(data["policy"]), data["seed"]
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ConfigError(f"seed={seed!r}: expected a whole number, 0 or more")
    system_of(policy)
    return Settings(
        policy=policy,
        seed=seed,
        trace=read_section(TraceConfig, data["trace"], "trace"),
        workload=read_section(WorkloadConfig, data["workload"], "workload"),
        cluster=read_section(SizeConfig, data["cluster"], "cluster"),
        costs=read_calibration(data["costs"]),
        severity=read_section(SeverityConfig, data["severity"], "severity"),
        detection=read_section(DetectionConfig, data["detection"], "detection"),
        output=read_section(_OutputConfig, data["output"], "output"),
    )


_SYSTEMS: Final[dict[str, type[Policy]]] = {system.name: system for system in SYSTEMS}
_ABLATIONS: Final = {ablation.name: ablation for ablation in ABLATIONS}
POLICIES: Final = (*_ABLATIONS, *_SYSTEMS)
"""Names of all policies of this package."""


def system_of(policy: str) -> str:
    """Return the system whose costs a policy has; a variant is named SYSTEM_WITHOUT_SOMETHING.

    Raises:
        ConfigError: no such policy.
    """
    return policy.partition("_")[0] if policy in POLICIES else _own(policy).costs_name()


def _own(policy: str) -> type[Policy]:
    """Import a user's policy by its dotted path, e.g. ``mine.Patient``.

    Raises:
        ConfigError: it cannot be imported, or is no `Policy` with a name.
    """
    module, _, name = policy.rpartition(".")
    if not module:
        raise ConfigError(f"policy={policy!r}: expected one of {', '.join(POLICIES)}, or MODULE.CLASS of your own")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"policy={policy!r}: {error}: expected MODULE.CLASS, importable here") from error
    if not (isinstance(found, type) and issubclass(found, Policy) and isinstance(getattr(found, "name", None), str)):
        raise ConfigError(f"policy={policy!r}: expected a subclass of {Policy.__module__}.Policy with a `name`")
    return found


def simulate(
    policy: str,
    cluster: SimCluster,
    tasks: Sequence[SimTask],
    trace: Trace,
    costs: Costs,
    limits: Limits = Limits(warm_standby=True),  # noqa: B008
) -> SimulationResult:
    """Replay a trace.

    Args:
        policy: one of `POLICIES`, or the dotted path of a user's own.
        cluster: the nodes.
        tasks: all tasks; those with arrival 0 run already.
        trace: the faults.
        costs: costs of the policy's system.
        limits: parameters of Unicron's coordinator.

    Returns:
        The result, byte for byte the same for the same arguments: only the trace was drawn at random, by its generator.

    Raises:
        ConfigError: an unknown policy, a fault of a node that does not exist, tasks of the same name.
    """
    names = [task.name for task in tasks]
    if len(set(names)) < len(names):
        raise ConfigError(f"tasks {names}: expected different names")
    for fault in trace.faults:
        if fault.node >= cluster.num_nodes or (fault.worker or 0) >= cluster.workers_per_node:
            given = f"{fault!r} in trace {trace.name!r}"
            size = f"{cluster.num_nodes} nodes of {cluster.workers_per_node} workers"
            raise ConfigError(f"{given}: expected one of {size}, numbered from 0")
    if policy in _ABLATIONS:
        with _rarely_collected():
            return System(_ABLATIONS[policy], cluster, tasks, trace, costs, limits).run()
    system = _SYSTEMS[policy] if policy in _SYSTEMS else _own(policy)
    return Healing(system(), cluster, tasks, trace, costs).run()


@contextmanager
def _rarely_collected() -> Iterator[None]:
    """Make the garbage collector run rarely: a machine with 100,000 agents creates hardly any cycles.

    Searching all of them repeatedly would take a fifth of the time.
    """
    before = gc.get_threshold()
    gc.set_threshold(200_000, 50, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*before)
