"""Facts: the events of a task's log from which measurements and accounts are derived, as typed values.

Rules log a fact with `Turn.log`. The log holds its name and its fields; times are time.time(). `read_fact` reads an
entry of the log, or a notice made from it, back as a fact. What facts say about failures and transitions is derived by
the functions below, for all accounts: the coordinator's, the callbacks' and the demonstration's.

Measurements of a running task, and records of its open incidents, are plain structs, kept in `state.Task`. The rules of
`accounting` fill them, and derive a `Bill` from an incident; `allocation.answers` derives the planner's inputs.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Literal, TypeVar

import msgspec
from typing_extensions import Self, override

from unicron_lightning import wire
from unicron_lightning.coordinator.severity.record import Severity

TransitionName = Literal["shrink_in_place", "grow_in_place", "restart", "reconfigure_cold"]
"""Kinds of a change of a task's workers.

``shrink_in_place``, ``grow_in_place``: workers leave or join, the others keep their processes and state. ``restart``:
processes are restarted on the same workers, in the same configuration. ``reconfigure_cold``: the task starts from a
checkpoint in another parallel configuration, or for the first time.
"""


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """The size of a world."""

    slots: int
    workers: int


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Duration of a step at one size, as measured last."""

    workers: int
    seconds: float
    """Duration of a step, > 0."""
    spread: float
    """Relative standard deviation of a single interval, robustly estimated."""
    intervals: int
    """Number of measured intervals."""
    at: float
    """time.time() of the newest measurement."""


class SpeedMeasurement(msgspec.Struct, kw_only=True):
    """The measurement in progress, of one settled epoch."""

    epoch: int = 0
    level: Level = Level(slots=0, workers=0)
    before: Level = Level(slots=0, workers=0)
    """Size of the previously settled epoch."""
    stands: bool = False
    """Whether a newer epoch was published, so that the measurement is suspended."""
    step: int = 0
    """Newest step that does not count: finished before the epoch, or by its transition."""
    worker: str = ""
    """Worker whose reports count: the first to finish a step in the epoch. Members step together, so one is enough."""
    at: float = 0.0
    """time.time() at which the worker finished ``step``, by its own clock."""
    seconds: list[float] = []
    """Seconds per step, in the newest intervals between two reports."""

    @property
    def median(self) -> float:
        """Duration of a step, seconds."""
        return statistics.median(self.seconds)


class MeasuredTransition(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the task's world, from its beginning to the first step finished after it."""

    kind: TransitionName
    seconds: float
    at: float
    """time.time() of its end."""


class Lifetimes(msgspec.Struct, kw_only=True):
    """Run times and failures of workers and slots."""

    workers_lost: int = 0
    """Processes that died by themselves; not those lost with their node."""
    slots_lost: int = 0
    """Number of agents lost."""
    worker_seconds: float = 0.0
    slot_seconds: float = 0.0


class Measured(msgspec.Struct, kw_only=True):
    """All measurements of a task."""

    flops_per_step: float | None = None
    """FLOPs per step, as reported by the workers."""
    samples_per_step: int = 0
    """Samples of the largest global batch, as reported by the workers; 0 if unknown."""
    pace: SpeedMeasurement = msgspec.field(default_factory=SpeedMeasurement)
    speeds: dict[int, Speed] = {}
    """Step times by number of slots."""
    transitions: list[MeasuredTransition] = []
    """The newest transitions, oldest first."""
    lifetimes: Lifetimes = msgspec.field(default_factory=Lifetimes)
    level: Level = Level(slots=0, workers=0)
    """Size that has been running since ``since`` and is not counted in `lifetimes` yet."""
    since: float = 0.0
    begun: float = 0.0
    """time.time() at which the transition in progress began; 0 if there is none."""


IncidentPhase = Literal["detection", "transition", "sub_healthy"]
PHASES: Final[tuple[IncidentPhase, ...]] = ("detection", "transition", "sub_healthy")


class Loss(msgspec.Struct, kw_only=True):
    """A period in which a task had fewer workers at work than it should have had."""

    phase: IncidentPhase
    due: Level
    """Size that the task should have had, less the part that an earlier incident accounts for."""
    had: Level
    seconds: float


class Incident(msgspec.Struct, kw_only=True):
    """A failure, with all its consequences."""

    id: str
    cause: str
    fault_at: float
    """time.time() of the failure by the clock of the process that observed it, but not after ``known_at``."""
    known_at: float
    """time.time() at which the coordinator learned of the failure."""
    stepped_at: float | None = None
    """time.time() at which the new world finished its first step."""
    number: int
    """Newest epoch when the failure became known: a first step in a newer one ends the transition."""
    failures: int = 0
    """Workers that died by themselves and agents that were lost, so far."""
    started_with: Level
    due: Level
    """Size that the task must reach again: ``started_with``, less slots removed by later plans."""
    losses: list[Loss] = []

    @property
    def phase(self) -> IncidentPhase:
        """The present phase; detection is over when an incident is known."""
        return "transition" if self.stepped_at is None else "sub_healthy"


class PhaseCost(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of a phase of an incident."""

    seconds: float
    worker_seconds: float
    """Missing workers x seconds, weighted."""
    waf_seconds: float | None
    """Missing FLOP, weighted; None if unknown."""


class Bill(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of an incident: docs/monitoring.md defines each number. Times are time.time()."""

    cause: str
    failures: int
    fault_at: float
    known_at: float
    stepped_at: float | None
    slots_before: int
    workers_before: int
    weight: float
    flops_per_step: float | None
    phases: dict[IncidentPhase, PhaseCost]


_Capacity = TypeVar("_Capacity")


def left_to(dues: Sequence[_Capacity], place: int, present: _Capacity) -> _Capacity:
    """Return the capacity for which one of several open incidents, oldest first, does not account, given their dues.

    Each accounts only for the capacity that the next one found, so nothing is counted twice; the newest for all that is
    missing from the ``present`` capacity.
    """
    return dues[place + 1] if place + 1 < len(dues) else present


class Accounts(msgspec.Struct, kw_only=True):
    """A task's open incidents, and the data needed to continue their bills."""

    open: list[Incident] = []
    """Open incidents, oldest first."""
    opened: int = 0
    """Number of the newest incident, open or not."""
    level: Level = Level(slots=0, workers=0)
    """Size of the world that finished the newest step."""
    places: int = 0
    """Places allocated to all tasks together when no incident was last open."""
    since: float = 0.0
    """time.time() up to which ``losses`` are recorded."""


FIRST_STEPS: Final[Mapping[str, TransitionName]] = {
    "recovered": "shrink_in_place",
    "shrunk": "shrink_in_place",
    "grown": "grow_in_place",
    "started": "restart",
}
"""`wire.WorkerEvent.name` of a worker that has finished its first step in an epoch, and the kind of transition."""
REPORTED: Final = "reported"
"""Cause of a death after a `wire.ErrorReport`: the preceding event gives the details."""
_OWN_DEATHS: Final = ("exit", "signal", "silent", REPORTED)
_OF_WORKERS: Final = "worker."
"""Prefix of the names in the log of events that workers report."""


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """An event of the log."""

    event: ClassVar[str]
    """Its name in the log."""
    omitted: ClassVar[tuple[str, ...]] = ()
    """Fields that the log omits if they are empty."""

    @property
    def entry(self) -> dict[str, Any]:
        """The fields in the log."""
        entry = msgspec.structs.asdict(self)
        return {name: value for name, value in entry.items() if value or name not in self.omitted}

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> Self | None:
        """Return the fact with these fields in the log; None if a field is missing."""
        if any(each.required and each.name not in entry for each in msgspec.structs.fields(cls)):
            return None
        return cls(**{name: entry[name] for name in cls.__struct_fields__ if name in entry})


class WorkerDeath(Fact, frozen=True, kw_only=True):
    """A worker's process has ended by a failure."""

    event, omitted = "worker_died", ("meaning",)
    worker: str
    cause: str
    code: int | None = None
    died_at: float | None = None
    received_at: float
    meaning: str = ""


class AgentLoss(Fact, frozen=True, kw_only=True):
    """An agent did not return in time."""

    event = "agent_lost"
    agent: str
    node: str
    away_since: float | None
    silent: float | None


class ErrorFact(Fact, frozen=True, kw_only=True):
    """An error was reported, or found by the coordinator itself, which then names no place."""

    event, omitted = "error_reported", ("told_as", "symptom")
    node: str | None = None
    agent: str | None = None
    worker: str | None = None
    rank: int | None = None
    phase: str = ""
    step: int | None
    kind: str
    severity: Severity
    cause: str
    ends: bool = False
    """Whether the worker's process ends by the error."""
    happened_at: float
    received_at: float
    details: Mapping[str, Any]
    told_as: str = ""
    """Kind in the report, if the coordinator does not know it."""
    symptom: bool = False
    """Whether another failure has caused it."""


class BrokenConnection(Fact, frozen=True, kw_only=True):
    """A worker reports a failed collective; the failure that explains it follows, or the connection is rebuilt."""

    event = "comm_error"
    worker: str
    epoch: int
    error: str


class EpochPublished(Fact, frozen=True, kw_only=True):
    """An epoch was published."""

    event = "epoch_published"
    number: int
    kind: wire.EpochKind
    hold: bool
    members: list[str]


class EpochSettled(Fact, frozen=True, kw_only=True):
    """All members have reported for an epoch."""

    event = "epoch_settled"
    number: int
    kind: wire.EpochKind


class FirstStep(Fact, frozen=True, kw_only=True):
    """A worker has finished its first step in an epoch. The log has its whole report, under the report's name."""

    event = "worker.first_step"
    name: str
    """`wire.WorkerEvent.name` of the report."""
    transition: TransitionName
    epoch: object
    """The epoch as reported."""
    at: float
    step: int | None = None
    world: int | None = None
    """Number of workers that finished the step."""
    recomputed: Sequence[int] = ()
    """Micro-batches of the step that all workers together recomputed."""

    @classmethod
    def reported(cls, name: str, at: float, report: Mapping[str, Any]) -> FirstStep | None:
        """Return the fact in a worker's report, see `wire.WorkerEvent`; None if it reports something else."""
        if (transition := FIRST_STEPS.get(name)) is None:
            return None
        step, world, again = report.get("step"), report.get("world"), report.get("recomputed")
        return cls(
            name=name,
            transition=transition,
            epoch=report.get("epoch"),
            at=at,
            step=step if isinstance(step, int) else None,
            world=world if isinstance(world, int) else None,
            recomputed=again if isinstance(again, list) else (),  # a worker's word: a figure must not depend on it
        )


class SlotGrant(Fact, frozen=True, kw_only=True):
    """An agent was granted a slot."""

    event = "slot_granted"
    agent: str
    node: str
    round: int
    group_rank: int
    group_world: int


class LifeBegun(Fact, frozen=True, kw_only=True):
    """The task starts a new life, from the agents' memory or a checkpoint.

    Attributes:
        path, step: of the newest checkpoint on disk.
        memory: step of the newest version in the agents' memory, unless the checkpoint is newer.
    """

    event = "task_restarts"
    life: int
    path: str | None
    step: int | None
    memory: int | None = None


class TaskEnd(Fact, frozen=True, kw_only=True):
    """The task is over."""

    event = "task_over"
    succeeded: bool
    reason: str
    life: int
    epoch: int


class IncidentClosed(Fact, frozen=True, kw_only=True):
    """An incident is over."""

    event = "incident_closed"
    outcome: str
    closed_at: float
    bill: Bill

    @property
    @override
    def entry(self) -> dict[str, Any]:
        return {"outcome": self.outcome, "closed_at": self.closed_at, **msgspec.to_builtins(self.bill)}

    @classmethod
    @override
    def read(cls, entry: Mapping[str, Any]) -> IncidentClosed | None:
        try:
            bill = msgspec.convert(entry, Bill, strict=False)
            return cls(outcome=entry["outcome"], closed_at=entry["closed_at"], bill=bill)
        except (msgspec.ValidationError, KeyError):
            return None


def read_fact(name: str, entry: Mapping[str, Any], at: float) -> Fact | None:
    """Return an event of the log, or a worker's notice, as a fact; None if it is none.

    Args:
        name: its name.
        entry: its fields.
        at: time.time() of the report, for a worker's event whose fields do not have it.
    """
    if name.startswith(_OF_WORKERS):
        return FirstStep.reported(name.removeprefix(_OF_WORKERS), entry.get("at", at), entry)
    kind = _KINDS.get(name)
    return None if kind is None else kind.read(entry)


_KINDS: Final[Mapping[str, type[Fact]]] = {kind.event: kind for kind in Fact.__subclasses__() if kind is not FirstStep}


def is_failure(fact: Fact | None) -> bool:
    """Whether it is a failure of its own: a worker that died by itself, or an agent that was lost."""
    return isinstance(fact, AgentLoss) or (isinstance(fact, WorkerDeath) and fact.cause in _OWN_DEATHS)


def occurred_at(fact: Fact | None) -> float | None:
    """Return when a failure occurred, by the clock of the process that observed it; None if unknown."""
    match fact:
        case WorkerDeath(died_at=at) | AgentLoss(away_since=at) | ErrorFact(happened_at=at):
            return at
    return None


def explains(fact: Fact | None) -> bool:
    """Whether it explains an incident that began with a `BrokenConnection`."""
    return is_failure(fact) or (isinstance(fact, ErrorFact) and fact.ends)


def cause_of(fact: Fact | None) -> str | None:
    """Describe the cause of an incident that begins with this fact; None for other facts."""
    match fact:
        case WorkerDeath():
            return fact.meaning or fact.cause
        case ErrorFact():
            return f"{fact.kind}: {fact.cause}"
        case AgentLoss():
            return "node lost"
        case BrokenConnection():
            return BrokenConnection.event
    return None
