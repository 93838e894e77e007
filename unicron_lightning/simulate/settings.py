"""One simulation as composed by Hydra: validated, and run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from unicron_lightning.errors import ConfigError
from unicron_lightning.sections import read_section
from unicron_lightning.simulate.calibration import Calibration, read_calibration
from unicron_lightning.simulate.result import SimulationResult
from unicron_lightning.simulate.run import simulate, system_of
from unicron_lightning.simulate.scenario import SizeConfig, WorkloadConfig, read_size, read_workload, scene
from unicron_lightning.simulate.trace import SimCluster, Trace
from unicron_lightning.simulate.traces.config import TraceConfig, read_trace
from unicron_lightning.simulate.traces.generate import generate
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
        trace=read_trace(data["trace"]),
        workload=read_workload(data["workload"]),
        cluster=read_size(data["cluster"]),
        costs=read_calibration(data["costs"]),
        output=read_section(OutputConfig, data["output"], "output"),
    )
