"""The schema of the coordinator's configuration. Durations are in seconds unless a name states otherwise.

Defaults and the choices of each group are the YAML files in ``conf/``; reasons are in docs/configuration.md.
Not frozen: Hydra cannot override values of a frozen schema.
"""

from __future__ import annotations

import math
import operator
import re
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal

from omegaconf import DictConfig, OmegaConf

from unicron_lightning.coordinator.events import Limits
from unicron_lightning.coordinator.severity.record import SEVERITY, SeverityLimits
from unicron_lightning.detection.health import HealthLimits, Pattern
from unicron_lightning.detection.silence import SilenceLimits
from unicron_lightning.errors import ConfigError
from unicron_lightning.jobs import Job, JobFields
from unicron_lightning.tls import AUTO
from unicron_lightning.wire import WatchLimits


def register_resolvers() -> None:
    """Register with OmegaConf how the files of the group ``detection`` derive times from ``timeout``."""
    OmegaConf.register_new_resolver("of_timeout", _of_timeout, replace=True)


def _of_timeout(factor: float, least: float = 0.0, *, _parent_: DictConfig) -> float:
    # rounded to microseconds, to avoid 0.15000000000000002
    return round(max(float(factor) * float(_parent_.timeout), float(least)), 6)


_EVENT: Final = re.compile(r"[a-z_]+(\.[a-z_]+)*")


def _check(group: str, sign: Literal[">", ">="], bound: int, **values: float) -> None:
    """Require each value to be finite and above the bound, or at least the bound; the error quotes key and value."""
    holds = operator.gt if sign == ">" else operator.ge
    for name, value in values.items():
        if not (math.isfinite(value) and holds(value, bound)):
            raise ConfigError(f"{group}.{name}={value}: expected a number {sign} {bound}")


@dataclass(kw_only=True)
class ProcessConfig:
    """Group ``coordinator``: the process itself."""

    host: str = "127.0.0.1"
    """Address to bind. Any address but a loopback one needs a token."""
    port: int = 29461
    """TCP port; 0 lets the system choose (it is written to ``coordinator.json`` in the state directory)."""
    token_file: str | None = None
    """File with the token that agents and `unicron status` must prove; the variable UNICRON_TOKEN has the same
    effect.
    """
    tls: str | None = None
    """Certificate with its key (PEM), or ``auto`` for one of its own; None: ``auto`` beyond loopback, plain on it."""
    tls_key: str | None = None
    """File of the key, if it is not in that of the certificate."""
    tls_client_ca: str | None = None
    """File of the CA of clients' certificates; None: clients need none."""
    plaintext: bool = False
    """Whether links are plain beyond loopback too."""
    started_by_agent: bool = False
    """Whether an agent started it: agents replace it when it dies, and wait for an operator's."""
    exit_when_idle: bool = False
    """Exit when no task is left to coordinate: for a coordinator that was started by an agent."""
    idle_linger: float = 3.0
    """Idle seconds after which an `exit_when_idle` coordinator exits."""
    startup_linger: float = 30.0
    """Idle seconds allowed before the first agent registers: starting torchrun takes seconds on a busy machine."""
    allow_injection: bool = False
    """Whether `unicron inject` may inject faults."""
    hook: list[str] = field(default_factory=list)
    """Command that is run for events, with the event as JSON on its standard input; empty: none."""
    hook_events: list[str] = field(
        default_factory=lambda: ["task_over", "incident_closed", "node_lost", "node_cordoned", "task_degraded"]
    )
    """Names of the events for which it is run."""
    hook_seconds: float = 30.0
    """Time after which the command is killed."""
    max_message_bytes: int = 16 * 1024 * 1024
    """Size limit of a message; a larger one ends its connection."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"coordinator.port={self.port}: expected 0..65535")
        if not self.host:
            raise ConfigError("coordinator.host is empty: expected an address or a host name")
        if self.tls_key is not None and self.tls in (None, AUTO):
            raise ConfigError(f"coordinator.tls_key={self.tls_key}: expected the certificate in coordinator.tls too")
        if self.hook and not self.hook[0]:
            raise ConfigError(f"coordinator.hook={self.hook}: expected a program and its arguments")
        if not all(_EVENT.fullmatch(name) for name in self.hook_events):
            raise ConfigError(f"coordinator.hook_events={self.hook_events}: expected names such as task_over")
        _check("coordinator", ">", 0, max_message_bytes=self.max_message_bytes, hook_seconds=self.hook_seconds)
        _check("coordinator", ">=", 0, idle_linger=self.idle_linger, startup_linger=self.startup_linger)


@dataclass(kw_only=True)
class ClusterConfig:
    """Group ``cluster``: the machines."""

    drained: list[str] = field(default_factory=list)
    """Nodes that are drained when the coordinator starts, in addition to those in its restored state."""
    warm_standby: bool = True
    """Whether agents without a slot start their workers in advance, up to the strategy's start.

    Such workers join within a second of a slot becoming free. Costs a start, and a worker's host memory, on each
    stand-by node.
    """

    def __post_init__(self) -> None:
        if not all(self.drained):
            raise ConfigError(f"cluster.drained={self.drained}: expected names of nodes")


@dataclass(kw_only=True)
class TaskConfig(JobFields):
    """One of ``tasks``: a task that the coordinator submits to itself at its start."""


@dataclass(kw_only=True)
class PlannerConfig:
    """Group ``planner``: estimates for the cluster, used before measurements exist."""

    enabled: bool = True
    """Whether places move from one task to another by plan; otherwise each task keeps its places."""
    node_mtbf_hours: float = 720.0
    """Node-hours per failure of a whole node."""
    worker_mtbf_hours: float = 720.0
    """Hours per failure of the workers in one slot, failures of their node excluded."""
    shrink_seconds: float = 0.5
    """Seconds that a task is interrupted when workers leave it and the others continue."""
    grow_seconds: float = 1.0
    """Seconds that a task is interrupted when workers join it."""
    restart_seconds: float = 15.0
    """Seconds that a task is interrupted when all its workers restart."""
    cold_seconds: float = 30.0
    """Seconds that a task is interrupted when it starts on other slots from a checkpoint, or for the first time."""
    caution: float = 0.0
    """Standard errors by which plans take each task's throughput to be less than measured or assumed; 0: as it is."""

    def __post_init__(self) -> None:
        _check("planner", ">", 0, node_mtbf_hours=self.node_mtbf_hours, worker_mtbf_hours=self.worker_mtbf_hours)
        _check("planner", ">", 0, shrink_seconds=self.shrink_seconds, grow_seconds=self.grow_seconds)
        _check("planner", ">", 0, restart_seconds=self.restart_seconds, cold_seconds=self.cold_seconds)
        if not (math.isfinite(self.caution) and self.caution >= 0):
            raise ConfigError(f"planner.caution={self.caution}: expected standard errors, 0 or more")


_ABOVE_ONE: Final = ("hang_factor", "degraded_factor", "straggler_factor")
"""Keys of `DetectionConfig` that are factors; all others are times."""
_MAY_BE_ZERO: Final = (
    *("reconnect_grace", "restart_grace", "comm_error_grace", "join_grace", "hang_slack", "change_time"),
    "degraded_time",
)


@dataclass(kw_only=True)
class DetectionConfig:
    """Group ``detection``: time limits of failure detection. It has no defaults here: see conf/detection."""

    timeout: float
    """Base time limit for a silent peer, from which other limits are derived."""
    heartbeat: float
    """Interval of pings to agents. A cut that closes no connection is detected after at most 1.5 intervals."""
    register_timeout: float
    """Time within which a new connection must register."""
    reconnect_grace: float
    """An agent whose connection ended is declared lost after this time. A closed connection nearly always is a dead
    process.
    """
    restart_grace: float
    """Time for agents to reconnect after a restart of the coordinator; half of it, at least 3 s, once one is there.
    Their back-off reaches 2 s.
    """
    comm_error_grace: float
    """Time within which a reported death explains a failed collective; else the epoch is renewed in place."""
    join_grace: float
    """Workers of one agent join together if they become ready within this time of each other."""
    pause_grace: float
    """Time for the members of a task that the plan pauses to finish the step and write a checkpoint."""
    worker_timeout: float
    """A worker without a heartbeat for this long is killed by its agent, unless the agent's user chose another time."""
    beat: float
    """Interval of agents' beats, which the coordinator answers; longer with more than a thousand agents."""
    least_silence: float
    """Silence after which a peer is declared dead, if its connection is known to be regular."""
    most_silence: float
    """Silence after which any peer is declared dead, however irregular its connection was."""
    recovery_time: float
    """Members that do not report for an epoch, or do not enter it, within this time are restarted."""
    hang_factor: float
    """A step fails at this multiple of the running average, and the rank that hangs is determined."""
    hang_slack: float
    """Seconds added to the limit of `hang_factor`."""
    change_time: float
    """Seconds added for the first steps after a change of the world, which may take ten times the previous average."""
    hook_time: float
    """Time limit of the script's code between two steps, after which it hangs."""
    data_time: float
    """Time limit of a loader for its next batch, after which it hangs."""
    stall_time: float
    """Time limit of any other part of training without a sign of progress, after which it hangs."""
    start_time: float
    """Time limit from a worker's welcome until it is ready to become a member, after which it hangs."""
    mute_time: float
    """Time limit of a silent worker that others wait for and that computes while it holds the interpreter's lock."""
    collective_time: float
    """Time limit of a collective in which all members wait and none is missing; then the epoch is renewed in place."""
    witness: bool
    """Whether a rank without progress in a step hangs only if another rank waits for it, or after `stall_time`."""
    probe_time: float
    """Time limit of a connection from one node to another, after which the other is not reached; longer than the second
    after which the kernel repeats a lost packet.
    """
    degraded_factor: float
    """Factor by which steps are slower than before in a degraded task."""
    straggler_factor: float
    """Factor by which a straggler's micro-batches are slower than its peers'."""
    degraded_time: float
    """Duration of slowness after which a task is degraded, or a rank a straggler."""

    def __post_init__(self) -> None:
        values = vars(self)
        others = [name for name in values if name not in (*_ABOVE_ONE, *_MAY_BE_ZERO, "witness")]
        _check("detection", ">", 0, **{name: values[name] for name in others})
        _check("detection", ">", 1, **{name: values[name] for name in _ABOVE_ONE})
        _check("detection", ">=", 0, **{name: values[name] for name in _MAY_BE_ZERO})

    def watch(self) -> WatchLimits:
        """Return the limits that workers use."""
        same = {name: value for name, value in vars(self).items() if name in WatchLimits.__struct_fields__}
        return WatchLimits(factor=self.hang_factor, slack=self.hang_slack, **same)

    def silence(self) -> SilenceLimits:
        """Return the limits after which a silent connection is closed."""
        return SilenceLimits(beat=self.beat, least=self.least_silence, most=self.most_silence)


@dataclass(kw_only=True)
class SeverityConfig(SeverityLimits):
    """Group ``severity``: escalation of repeated errors. See docs/detection.md."""

    def __post_init__(self) -> None:
        _check("severity", ">", 0, **{name: value for name, value in vars(self).items() if name != "strict"})


@dataclass(kw_only=True)
class _PatternConfig:
    """One of ``health.patterns``."""

    pattern: str = ""
    """A regular expression of Python, searched in ``TYPE: message`` of an exception."""
    kind: str = ""
    """One of the kinds of errors, which has a severity: docs/detection.md."""


@dataclass(kw_only=True)
class HealthConfig(HealthLimits):
    """Group ``health``: kinds of errors, and limits of a healthy node. See docs/detection.md."""

    patterns: list[_PatternConfig] = field(default_factory=list)
    """Patterns of errors and their kinds, consulted before the built-in table."""
    nan_loss: str = "tell"
    """Reaction to a loss that is NaN or infinite: ``tell`` (log an error), or ``stop`` the task."""
    flapping_cuts: int = 3
    """Number of broken and renewed connections of an agent within the window at which its link is flapping."""
    flapping_window: float = 300.0
    """Window of `flapping_cuts`, in seconds."""

    def __post_init__(self) -> None:
        for row in self.patterns:
            if row.kind not in SEVERITY or not row.pattern:
                raise ConfigError(
                    f"health.patterns: {row.pattern!r} of kind {row.kind!r}: expected a pattern and "
                    f"one of {', '.join(SEVERITY)}"
                )
            Pattern(pattern=row.pattern, kind=row.kind)
        _check("health", ">=", 0, **{each.name: getattr(self, each.name) for each in fields(HealthLimits)})
        _check("health", ">", 0, flapping_cuts=self.flapping_cuts, flapping_window=self.flapping_window)
        if self.nan_loss not in ("tell", "stop"):
            raise ConfigError(f"health.nan_loss={self.nan_loss}: expected tell or stop")


_OF_ETCD: Final = ("endpoints", "user", "password_file", "ca", "cert", "cert_key")
"""Keys of `StoreConfig` that only ``kind: etcd`` uses."""
_URL: Final = re.compile(r"(https?)://(\[[0-9a-fA-F:.]+\]|[^][:/@,\s]+):([0-9]{1,5})/?")
_PREFIX: Final = re.compile(r"/?([A-Za-z0-9._-]+/)+")


@dataclass(kw_only=True)
class StoreConfig:
    """Group ``store``: data that outlives the process."""

    kind: str = "sqlite"
    """``sqlite``: a database in ``state_dir``; ``etcd``: keys in etcd, for several coordinators with one leader."""
    state_dir: str | None = None
    """Directory for the state; default $UNICRON_STATE_DIR or <tempdir>/unicron-<uid>/<host>-<port>."""
    events_kept: int = 100_000
    """Number of newest events that are kept in the log; older ones are deleted. In etcd at most 20,000 are kept."""
    endpoints: list[str] = field(default_factory=list)
    """URLs of etcd's members, https beyond loopback unless ``coordinator.plaintext``."""
    prefix: str = "unicron/"
    """Beginning of all keys in etcd: one for each cluster."""
    user: str | None = None
    """Name of etcd's user; the password is in the variable UNICRON_ETCD_PASSWORD or in ``password_file``."""
    password_file: str | None = None
    """File with the password."""
    ca: str | None = None
    """Certificates (PEM) of the CA of etcd's members; None: those of the system."""
    cert: str | None = None
    """Certificate (PEM) that the coordinator shows to etcd, perhaps with its key."""
    cert_key: str | None = None
    """File of the key, if it is not in that of the certificate."""
    lease_seconds: int = 3
    """Time after which a leader that etcd does not hear has lost the leadership."""
    compact_seconds: float = 300.0
    """Time between compactions of etcd by the leader; 0: etcd is compacted by others."""

    def __post_init__(self) -> None:
        _check("store", ">", 0, events_kept=self.events_kept)
        _check("store", ">=", 0, compact_seconds=self.compact_seconds)
        if self.kind not in ("sqlite", "etcd"):
            raise ConfigError(f"store.kind={self.kind}: expected sqlite or etcd")
        if self.kind == "sqlite" and (given := [name for name in _OF_ETCD if getattr(self, name)]):
            raise ConfigError(f"store.{given[0]}={getattr(self, given[0])}: expected store=etcd with it")
        if self.kind == "etcd" and not self.endpoints:
            raise ConfigError("store.endpoints=[]: expected URLs of etcd, e.g. [https://10.0.0.1:2379]")
        for url in self.endpoints:
            if _URL.fullmatch(url) is None:
                raise ConfigError(f"store.endpoints={url}: expected http(s)://HOST:PORT")
        if _PREFIX.fullmatch(self.prefix) is None:
            raise ConfigError(f"store.prefix={self.prefix}: expected names that each end in /")
        if not 2 <= self.lease_seconds <= 60:
            raise ConfigError(f"store.lease_seconds={self.lease_seconds}: expected 2 to 60")
        if self.cert_key is not None and self.cert is None:
            raise ConfigError(f"store.cert_key={self.cert_key}: expected the certificate in store.cert too")
        if self.password_file is not None and self.user is None:
            raise ConfigError(f"store.password_file={self.password_file}: expected the user in store.user too")


@dataclass(kw_only=True)
class CoordinatorConfig:
    """The whole configuration."""

    detection: DetectionConfig
    coordinator: ProcessConfig = field(default_factory=ProcessConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    tasks: dict[str, TaskConfig] = field(default_factory=dict)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    severity: SeverityConfig = field(default_factory=SeverityConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    store: StoreConfig = field(default_factory=StoreConfig)

    def limits(self) -> Limits:
        """Return the parameters of the state machine."""
        sections = (self.coordinator, self.cluster, self.detection, self.health)
        given = {name: value for section in sections for name, value in vars(section).items()}
        silence = self.detection.silence()
        if self.store.kind == "etcd":  # a leader that is silent for as long as its lease leads no more
            silence = replace(silence, most=min(silence.most, max(silence.least, self.store.lease_seconds)))
        made: dict[str, Any] = {
            "silence": silence,
            "watch": self.detection.watch(),
            "health": HealthLimits(**{each.name: given[each.name] for each in fields(HealthLimits)}),
            "severity": SeverityLimits(**vars(self.severity)),
            "patterns": tuple(Pattern(pattern=row.pattern, kind=row.kind) for row in self.health.patterns),
        }
        same = {each.name: given[each.name] for each in fields(Limits) if each.name in given}
        return Limits(**{**same, **made})

    def jobs(self) -> list[Job]:
        """Return the tasks to submit, in their order.

        Raises:
            ConfigError: one of them is wrong.
        """
        found = []
        for name, task in self.tasks.items():
            try:
                found.append(task.job(name))
            except ConfigError as error:
                raise ConfigError(f"tasks.{name}: {error}") from None
        return found
