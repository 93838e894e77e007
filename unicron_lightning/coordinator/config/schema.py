"""The schema of the coordinator's configuration. Durations are in seconds unless a name says otherwise.

Defaults and the choices of each group are the YAML files in ``conf/``; reasons are in docs/configuration.md.

Not frozen: to Hydra a frozen schema is one whose values cannot be overridden.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from unicron_lightning.coordinator.config.checks import check_above_one, check_not_negative, check_positive
from unicron_lightning.coordinator.config.health import HealthConfig
from unicron_lightning.coordinator.events import Limits
from unicron_lightning.detection.patterns import Pattern
from unicron_lightning.detection.silence import SilenceLimits
from unicron_lightning.errors import ConfigError
from unicron_lightning.jobs import Job, problem
from unicron_lightning.wire import WatchLimits


@dataclass(kw_only=True)
class ProcessConfig:
    """Group ``coordinator``: the process itself."""

    host: str = "127.0.0.1"
    """Address to bind. Anything but a loopback address needs a token."""
    port: int = 29461
    """TCP port; 0 lets the system choose (it is written to ``coordinator.json`` in the state directory)."""
    token_file: str | None = None
    """File with the token that agents and `unicron status` must show; the variable UNICRON_TOKEN does the same."""
    exit_when_idle: bool = False
    """End when nothing is left to coordinate: for a coordinator that was started by an agent."""
    idle_linger: float = 3.0
    """How long nothing must be there before an `exit_when_idle` coordinator ends."""
    startup_linger: float = 30.0
    """The same before the first agent has come: starting torchrun takes seconds on a busy machine."""
    allow_injection: bool = False
    """Whether `unicron inject` may break tasks on purpose."""
    max_message_bytes: int = 16 * 1024 * 1024
    """Larger messages end the connection that they come over."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"coordinator.port={self.port}: expected 0..65535")
        if not self.host:
            raise ConfigError("coordinator.host is empty: expected an address or a host name")
        check_positive("coordinator", max_message_bytes=self.max_message_bytes)
        check_not_negative("coordinator", idle_linger=self.idle_linger, startup_linger=self.startup_linger)


@dataclass(kw_only=True)
class ClusterConfig:
    """Group ``cluster``: the machines."""

    drained: list[str] = field(default_factory=list)
    """Nodes that are drained when the coordinator starts, beside those that its state says are."""
    warm_standby: bool = True
    """Whether agents without a slot start their workers up to the strategy's start, to be there within a second when a
    slot is free. Costs a start, and a worker's host memory, on each node that stands by."""

    def __post_init__(self) -> None:
        if not all(self.drained):
            raise ConfigError(f"cluster.drained={self.drained}: expected names of nodes")


@dataclass(kw_only=True)
class TaskConfig:
    """One of ``tasks``: a task that the coordinator submits to itself at its start. Fields as in `jobs.Job`."""

    command: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    folder: str | None = None
    weight: float = 1.0
    min_nodes: int = 1
    max_nodes: int = 1
    workers_per_node: int = 1
    max_restarts: int = 1000
    flops_per_step: float | None = None
    profile: dict[int, float] = field(default_factory=dict)

    def job(self, name: str) -> Job:
        """The definition under this name.

        Raises:
            ConfigError: it is wrong.
        """
        job = Job(name=name, **vars(self))
        wrong = problem(job)
        if wrong is not None:
            raise ConfigError(f"tasks.{name}: {wrong}")
        return job


@dataclass(kw_only=True)
class PlannerConfig:
    """Group ``planner``: what is believed of the cluster before anything was measured."""

    enabled: bool = True
    """Whether places go from one task to another by plan; else each task keeps what it has."""
    node_mtbf_hours: float = 720.0
    """Node-hours per failure of a whole node."""
    worker_mtbf_hours: float = 720.0
    """Hours per failure of the workers in one slot, their node left aside."""
    shrink_seconds: float = 0.5
    """How long a task stands still when workers leave it and the others train on."""
    grow_seconds: float = 1.0
    """The same when workers join those that train."""
    restart_seconds: float = 15.0
    """The same when all its workers start anew."""
    cold_seconds: float = 30.0
    """The same when it starts on other slots from a checkpoint, or for the first time."""

    def __post_init__(self) -> None:
        check_positive("planner", node_mtbf_hours=self.node_mtbf_hours, worker_mtbf_hours=self.worker_mtbf_hours)
        check_positive("planner", shrink_seconds=self.shrink_seconds, grow_seconds=self.grow_seconds)
        check_positive("planner", restart_seconds=self.restart_seconds, cold_seconds=self.cold_seconds)


@dataclass(kw_only=True)
class DetectionConfig:
    """Group ``detection``: how long to wait before conclusions are drawn. Without defaults here: see conf/detection."""

    timeout: float
    """Base from which the others follow: about how long something silent is waited for."""
    heartbeat: float
    """Interval of pings to agents. A cut that closes no connection is noticed after at most 1.5 intervals."""
    register_timeout: float
    """A new connection must say who it is within this time."""
    reconnect_grace: float
    """An agent whose connection ended is lost after this. A closed connection nearly always is a dead process."""
    restart_grace: float
    """After a restart of the coordinator agents have this long to come back; their back-off reaches 2 s."""
    comm_error_grace: float
    """A death explains a failed collective if it is reported within this time; else the epoch is renewed in place."""
    join_grace: float
    """Workers of one agent join together if they get ready within this time of each other."""
    worker_timeout: float
    """A worker without a heartbeat for this long is killed by its agent, unless the agent's user chose another time."""
    beat: float
    """Interval of agents' beats, which the coordinator answers; longer where there are more than a thousand agents."""
    least_silence: float
    """An agent or coordinator that is silent for this long may be gone: on a connection known to be regular it is."""
    most_silence: float
    """One that is silent for this long is gone, however irregular its connection was."""
    recovery_time: float
    """Members that do not report for an epoch, or do not enter it, within this time are restarted."""
    hang_factor: float
    """A step that takes so many times the running average has failed, and its culprit is looked for."""
    hang_slack: float
    """Beyond that."""
    change_time: float
    """The first steps after a change of the world may take ten times the average before it, and so much longer."""
    hook_time: float
    """Code of the script between two steps that runs longer hangs."""
    data_time: float
    """A loader that gives nothing for longer hangs."""
    stall_time: float
    """Anything else in training that shows no sign of life for longer hangs."""
    start_time: float
    """A worker that is not ready to become a member so long after it was welcomed hangs."""
    mute_time: float
    """A silent worker for which others wait, and that computes with the interpreter's lock, hangs after this time."""
    collective_time: float
    """All members may wait so long in a collective of which none is missing; then the epoch is renewed in place."""
    degraded_factor: float
    """A task whose steps take so many times what they did is degraded..."""
    straggler_factor: float
    """...and a rank whose micro-batches take so many times its peers' a straggler..."""
    degraded_time: float
    """...if that goes on for so long."""

    def __post_init__(self) -> None:
        check_positive(
            "detection",
            timeout=self.timeout,
            heartbeat=self.heartbeat,
            register_timeout=self.register_timeout,
            worker_timeout=self.worker_timeout,
            beat=self.beat,
            least_silence=self.least_silence,
            most_silence=self.most_silence,
            recovery_time=self.recovery_time,
            hook_time=self.hook_time,
            data_time=self.data_time,
            stall_time=self.stall_time,
            start_time=self.start_time,
            mute_time=self.mute_time,
            collective_time=self.collective_time,
        )
        check_above_one("detection", hang_factor=self.hang_factor, degraded_factor=self.degraded_factor)
        check_above_one("detection", straggler_factor=self.straggler_factor)
        check_not_negative(
            "detection",
            reconnect_grace=self.reconnect_grace,
            restart_grace=self.restart_grace,
            comm_error_grace=self.comm_error_grace,
            join_grace=self.join_grace,
            hang_slack=self.hang_slack,
            change_time=self.change_time,
            degraded_time=self.degraded_time,
        )

    def watch(self) -> WatchLimits:
        """The part that workers go by."""
        return WatchLimits(
            factor=self.hang_factor,
            slack=self.hang_slack,
            change_time=self.change_time,
            hook_time=self.hook_time,
            data_time=self.data_time,
            stall_time=self.stall_time,
            start_time=self.start_time,
            degraded_factor=self.degraded_factor,
        )

    def silence(self) -> SilenceLimits:
        """When a silent connection is given up."""
        return SilenceLimits(beat=self.beat, least=self.least_silence, most=self.most_silence)


@dataclass(kw_only=True)
class SeverityConfig:
    """Group ``severity``: when the answer to an error was not enough. See docs/severity.md."""

    reattempt_limit: int = 3
    """So often is a broken connection renewed in place, without a finished step, before a suspect is restarted."""
    reattempt_window: float = 300.0
    """Renewals longer ago do not count."""
    soon_steps: int = 3
    """A worker that took part in fewer steps failed soon after it came: such failures speak against its node."""
    cordon_failures: int = 4
    """So many of them in a row on one node, and it is cordoned."""
    cordon_window: float = 3600.0
    """Failures longer ago do not count."""
    crash_attempts: int = 5
    """A task that failed so often at the same step, with no step finished beyond it, is stopped."""
    crash_lives: int = 10
    """The same for lives from a checkpoint none of which got further than those before."""

    def __post_init__(self) -> None:
        check_positive("severity", **vars(self))


@dataclass(kw_only=True)
class StoreConfig:
    """Group ``store``: what outlives the process."""

    state_dir: str | None = None
    """Directory for the state; default $UNICRON_STATE_DIR or <tempdir>/unicron-<uid>/<host>-<port>."""
    events_kept: int = 100_000
    """Events of the log that are kept at a start; older ones are deleted."""

    def __post_init__(self) -> None:
        check_positive("store", events_kept=self.events_kept)


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
        """The part that the state machine goes by."""
        return Limits(
            reconnect_grace=self.detection.reconnect_grace,
            restart_grace=self.detection.restart_grace,
            comm_error_grace=self.detection.comm_error_grace,
            join_grace=self.detection.join_grace,
            worker_timeout=self.detection.worker_timeout,
            silence=self.detection.silence(),
            health=self.health.limits(),
            pairs=self.health.pairs(),
            flapping_cuts=self.health.flapping_cuts,
            flapping_window=self.health.flapping_window,
            recovery_time=self.detection.recovery_time,
            watch=self.detection.watch(),
            mute_time=self.detection.mute_time,
            collective_time=self.detection.collective_time,
            degraded_time=self.detection.degraded_time,
            straggler_factor=self.detection.straggler_factor,
            **vars(self.severity),
            patterns=tuple(Pattern(pattern=row.pattern, kind=row.kind) for row in self.health.patterns),
            nan_loss=self.health.nan_loss,
            warm_standby=self.cluster.warm_standby,
            allow_injection=self.coordinator.allow_injection,
            exit_when_idle=self.coordinator.exit_when_idle,
            idle_linger=self.coordinator.idle_linger,
            startup_linger=self.coordinator.startup_linger,
        )

    def jobs(self) -> list[Job]:
        """The tasks that are to be submitted, in their order.

        Raises:
            ConfigError: one of them is wrong.
        """
        return [task.job(name) for name, task in self.tasks.items()]
