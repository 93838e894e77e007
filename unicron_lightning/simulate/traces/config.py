"""What a trace file says: the schema, its defaults, units and reasons.

A trace is made of independent *sources* of failures. Each has *causes*, which say what kind of error it is and how
often it is this one. How a source's failures lie in time is its `process`; the mean number of failures is the same for
all:

    components x hours / mtbf_hours            components: workers, nodes or switches of the cluster
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from unicron_lightning.coordinator.severity.errors import SEVERITY
from unicron_lightning.errors import ConfigError
from unicron_lightning.planning.sections import read_section

Process = Literal["poisson", "weibull", "bursts", "exact"]
Distribution = Literal["lognormal", "uniform", "fixed", "none"]


@dataclass(frozen=True, kw_only=True)
class RepairConfig:
    """How long a node is away after a failure of severity SEV1; after others its processes start again at once."""

    distribution: Distribution = "none"
    """``lognormal`` (median_hours, log_deviation), ``uniform`` (least_hours, most_hours), ``fixed`` (hours)."""
    median_hours: float = 0.0
    log_deviation: float = 0.0
    """Standard deviation of the logarithm: with 1 two thirds of all lie within a factor of 2.7 of the median."""
    least_hours: float = 0.0
    most_hours: float = 0.0
    hours: float = 0.0

    def __post_init__(self) -> None:
        numbers = ("median_hours", "log_deviation", "least_hours", "most_hours", "hours")
        for name in numbers:
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name}={value!r}: expected a finite number, 0 or more")
        if self.distribution == "lognormal" and not self.median_hours:
            raise ConfigError("distribution=lognormal without median_hours: expected hours > 0")
        if self.distribution == "uniform" and self.most_hours < self.least_hours:
            given = f"least_hours={self.least_hours}, most_hours={self.most_hours}"
            raise ConfigError(f"{given}: expected least_hours <= most_hours")


@dataclass(frozen=True, kw_only=True)
class CauseConfig:
    """Why something fails, and as what error it is seen."""

    kind: str
    """Of `unicron_lightning.coordinator.severity.errors`."""
    count: float
    """How often, beside the other causes of its source: what counts is the share."""

    def __post_init__(self) -> None:
        if self.kind not in SEVERITY:
            raise ConfigError(f"kind={self.kind!r}: expected one of {', '.join(SEVERITY)}")
        if not (math.isfinite(self.count) and self.count > 0):
            raise ConfigError(f"count={self.count!r}: expected a number > 0")


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """Failures of one sort of component."""

    component: Literal["worker", "node", "switch"]
    """What fails. A switch takes all its nodes along at the same moment."""
    mtbf_hours: float
    """Component-hours per failure of one component, on average."""
    causes: dict[str, CauseConfig]
    process: Process = "poisson"
    """``poisson``: at a constant rate. ``weibull``: lifetimes of components, all new at the beginning, with `shape`.
    ``bursts``: a failure brings more of the same component and its neighbours soon after. ``exact``: at random times,
    but as many, and as many of each cause, as the mean says: for traces that repeat what was counted."""
    shape: float = 1.0
    """Of ``weibull``: below 1 failures are frequent in the beginning, above 1 they come with age."""
    burst_size: float = 1.0
    """Of ``bursts``: mean number of failures in one, the first included; their numbers are geometric."""
    burst_seconds: float = 600.0
    """Of ``bursts``: mean time between the failures of one."""
    neighbours: int = 1
    """Of ``bursts``: they strike among so many components in a row."""
    nodes_per_switch: int = 16
    """Of ``switch``: nodes that it takes along."""
    frequency: float = 1.0
    """Times as frequent as `mtbf_hours` says."""
    repair: RepairConfig = field(default_factory=RepairConfig)
    origin: str = ""
    """Where the numbers come from."""

    def __post_init__(self) -> None:
        for name in ("mtbf_hours", "shape", "burst_seconds", "frequency"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name}={value!r}: expected a finite number > 0")
        for name in ("burst_size", "neighbours", "nodes_per_switch"):
            if not getattr(self, name) >= 1:
                raise ConfigError(f"{name}={getattr(self, name)!r}: expected a number of at least 1")
        if not self.causes:
            raise ConfigError("causes: none, expected at least one")


@dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """A trace: generated, or read from a CSV file of one's own events, or said in sentences."""

    name: str
    """For tables and pictures."""
    days: float
    """How long it is."""
    sources: dict[str, SourceConfig] = field(default_factory=dict)
    """What fails, by names of one's own. Each has random numbers of its own: to change one changes no other."""
    csv: str | None = None
    """A file with the columns of `unicron_lightning.simulate.traces.table`; added to what the sources make."""
    faults: list[str] = field(default_factory=list)
    """Sentences of docs/faults.md, see `unicron_lightning.simulate.traces.sentences`; added too."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.days) and self.days > 0):
            raise ConfigError(f"days={self.days!r}: expected a number > 0")


def read_trace(data: Mapping[str, Any]) -> TraceConfig:
    """A trace's configuration from plain data.

    Raises:
        ConfigError: an unknown or missing key, or a wrong value.
    """
    return read_section(TraceConfig, data, "trace")
