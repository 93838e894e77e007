"""The schema of a trace file, with defaults, units and reasons.

A trace consists of independent *sources* of failures. Each has *causes*, which give the kind of error and its relative
frequency. The distribution of a source's failures in time is its `process`; the mean number of failures is the same for
all processes:

    components x hours / mtbf_hours            components: workers, nodes or switches of the cluster
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from unicron_lightning.coordinator.severity.errors import SEVERITY
from unicron_lightning.errors import ConfigError
from unicron_lightning.simulate.trace import CORRUPTING, SLOWDOWN, SLOWING, Strikes

Process = Literal["poisson", "weibull", "bursts", "exact"]
Distribution = Literal["lognormal", "uniform", "fixed", "none"]


@dataclass(frozen=True, kw_only=True)
class RepairConfig:
    """Downtime of a node after a failure of severity SEV1; after others its processes restart immediately.

    For kinds that slow a node down: the time until it is as fast as before; for kinds that corrupt the state: the time
    until that is detected.
    """

    distribution: Distribution = "none"
    """``lognormal`` (median_hours, log_deviation), ``uniform`` (least_hours, most_hours), ``fixed`` (hours)."""
    median_hours: float = 0.0
    log_deviation: float = 0.0
    """Standard deviation of the logarithm: with 1, two thirds of all values lie within a factor of 2.7 of the
    median.
    """
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
    """A cause of failures, and the kind of error that it appears as."""

    kind: str
    """Kind of error, of `unicron_lightning.coordinator.severity.errors`."""
    count: float
    """Frequency relative to the other causes of its source: only the share matters."""
    strikes: Strikes = "one"
    """``task``: all workers of the task that the component belongs to, as a bug or a poisoned batch does."""
    slowdown: float = SLOWDOWN
    """Fraction by which steps take longer, for ``node_degraded`` and ``link_degraded``."""
    repair: RepairConfig | None = None
    """Downtime after this cause; null: that of the source."""

    @property
    def lasts(self) -> bool:
        """Whether a duration belongs to it: the node is away, slow, or the damage is not detected yet."""
        return SEVERITY[self.kind] == "SEV1" or self.kind in (*SLOWING, *CORRUPTING)

    def __post_init__(self) -> None:
        if self.kind not in SEVERITY:
            raise ConfigError(f"kind={self.kind!r}: expected one of {', '.join(SEVERITY)}")
        if self.strikes == "task" and self.lasts:
            raise ConfigError(
                f"kind={self.kind!r}, strikes='task': expected a kind that stops workers, whose nodes stay up"
            )
        if not (math.isfinite(self.slowdown) and self.slowdown > 0):
            raise ConfigError(f"slowdown={self.slowdown!r}: expected a fraction > 0")
        if not (math.isfinite(self.count) and self.count > 0):
            raise ConfigError(f"count={self.count!r}: expected a number > 0")


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """Failures of one sort of component."""

    component: Literal["worker", "node", "switch"]
    """The component that fails. A switch takes down all its nodes at the same moment."""
    mtbf_hours: float
    """Component-hours per failure of one component, on average."""
    causes: dict[str, CauseConfig]
    process: Process = "poisson"
    """Distribution of failures in time:

    * ``poisson``: a constant rate.
    * ``weibull``: lifetimes of components, all new at the beginning, with `shape`.
    * ``bursts``: a failure is soon followed by more of the same component and its neighbours.
    * ``exact``: random times, but exactly the mean number of failures, and of each cause, to repeat counted events.
    """
    shape: float = 1.0
    """Shape of ``weibull``: below 1 failures are frequent at the beginning, above 1 they increase with age."""
    burst_size: float = 1.0
    """Mean number of failures in one of the ``bursts``, the first included; the numbers are geometric."""
    burst_seconds: float = 600.0
    """Mean seconds between the failures within one of the ``bursts``."""
    neighbours: int = 1
    """Number of consecutive components that one of the ``bursts`` strikes."""
    nodes_per_switch: int = 16
    """Nodes that a ``switch`` takes down."""
    offenders: float = 0.0
    """Fraction of the components that fail repeatedly (lemons), drawn at random; the mean over all stays `mtbf_hours`.
    For ``poisson`` and ``exact``.
    """
    offender_factor: float = 10.0
    """How many times as often as another an offender fails."""
    frequency: float = 1.0
    """Factor on the frequency given by `mtbf_hours`."""
    repair: RepairConfig = field(default_factory=RepairConfig)
    origin: str = ""
    """Origin of the numbers."""

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
        if not 0 <= self.offenders < 1 or not self.offender_factor >= 1:
            given = f"offenders={self.offenders}, offender_factor={self.offender_factor}"
            raise ConfigError(f"{given}: expected a fraction below 1, and a factor of at least 1")
        if self.offenders and self.process not in ("poisson", "exact"):
            raise ConfigError(f"offenders={self.offenders}, process={self.process}: expected poisson or exact")


@dataclass(frozen=True, kw_only=True)
class CoordinatorFaults:
    """Failures of Unicron's coordinator, at a constant rate. Other systems have none."""

    mtbf_hours: float
    """Mean hours between two failures."""
    minutes: float = 1.0
    """Time until another one has read its stored state."""

    def __post_init__(self) -> None:
        for name in ("mtbf_hours", "minutes"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name}={value!r}: expected a finite number > 0")


@dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """A trace: generated, read from a CSV file of a user's own events, or given as sentences."""

    name: str
    """Name for tables and pictures."""
    days: float
    """Duration in days."""
    sources: dict[str, SourceConfig] = field(default_factory=dict)
    """Sources of failures by freely chosen names. Each has its own random numbers: a change affects no other source."""
    csv: str | None = None
    """A file with the columns of `unicron_lightning.simulate.traces.table`; added to the sources' failures."""
    faults: list[str] = field(default_factory=list)
    """Sentences of docs/faults.md, see `unicron_lightning.simulate.traces.generate`; added to the sources'
    failures.
    """

    coordinator: CoordinatorFaults | None = None
    """Failures of the coordinator; null: none."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.days) and self.days > 0):
            raise ConfigError(f"days={self.days!r}: expected a number > 0")
