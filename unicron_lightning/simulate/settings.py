"""One simulation as composed by Hydra: validated, and run."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from unicron_lightning.errors import ConfigError
from unicron_lightning.sections import read_section
from unicron_lightning.simulate.calibration import Calibration, read_calibration
from unicron_lightning.simulate.costs import Costs
from unicron_lightning.simulate.healing import Healing
from unicron_lightning.simulate.policies.policy import SYSTEMS, Policy
from unicron_lightning.simulate.result import SimulationResult
from unicron_lightning.simulate.scenario import SizeConfig, WorkloadConfig, scene
from unicron_lightning.simulate.trace import SimCluster, Trace
from unicron_lightning.simulate.traces.config import TraceConfig
from unicron_lightning.simulate.traces.generate import generate
from unicron_lightning.simulate.unicron.system import ABLATIONS, System
from unicron_lightning.simulate.workload import SimTask

Format = Literal["csv", "parquet"]


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """Output of a simulation."""

    format: Format = "csv"
    """Format of tables; parquet needs pyarrow."""
    pictures: bool = True
    """Whether to draw pictures, if matplotlib is installed."""
    progress: bool = True
    """Whether sweeps show a progress bar, on a terminal."""
    reference: str = "megatron"
    """The policy that others are compared with."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One simulation.

    Attributes:
        policy: one of `run.POLICIES`, or MODULE.CLASS of a user's own.
        seed: seed of the trace.
        trace, workload, cluster, costs: the groups.
        output: its output.
    """

    policy: str
    seed: int
    trace: TraceConfig
    workload: WorkloadConfig
    cluster: SizeConfig
    costs: Calibration
    output: OutputConfig = field(default_factory=OutputConfig)

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
        return simulate(self.policy, cluster, tasks, trace, self.costs.of(system_of(self.policy)))


def read_settings(data: Mapping[str, Any]) -> Settings:
    """Read composed settings from plain data.

    Raises:
        ConfigError: an unknown or missing key, or a wrong value, with the full key.
    """
    known = ("policy", "seed", "trace", "workload", "cluster", "costs", "output")
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
        output=read_section(OutputConfig, data["output"], "output"),
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
    policy: str, cluster: SimCluster, tasks: Sequence[SimTask], trace: Trace, costs: Costs
) -> SimulationResult:
    """Replay a trace.

    Args:
        policy: one of `POLICIES`, or the dotted path of a user's own.
        cluster: the nodes.
        tasks: all tasks; those with arrival 0 run already.
        trace: the faults.
        costs: costs of the policy's system.

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
            return System(_ABLATIONS[policy], cluster, tasks, trace, costs).run()
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
