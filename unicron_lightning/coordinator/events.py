"""Inputs and outputs of the coordinator's state machine: plain frozen values.

The machine has no clock and does no I/O. The shell (`server.Server`) turns sockets and timers into *inputs* and carries
out the *actions*; tests and simulations do the same without sockets. Both are msgspec structs, since a large task
creates them by the thousand: the construction of a dataclass takes five times as long.

Questions of the machine to the planner are plain values, counted in places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, Union

import msgspec

from unicron_lightning import wire
from unicron_lightning.coordinator.incidents.facts import Fact
from unicron_lightning.coordinator.severity.record import SeverityLimits
from unicron_lightning.detection.health import HealthLimits, Pattern
from unicron_lightning.detection.silence import SilenceLimits
from unicron_lightning.faults.fault import Fault
from unicron_lightning.jobs import Job
from unicron_lightning.terms import Terms
from unicron_lightning.wire.daemon import FromNode, ToNode


@dataclass(frozen=True, kw_only=True)
class Competitor:
    """A task that competes for places.

    Attributes:
        name: its id.
        since: time.time() of its creation: of equally good plans, the one for the oldest tasks is chosen.
        terms: the terms on which it competes for places, each of which counts as a worker. Before a plan pauses it
            while it runs, its workers write a checkpoint.
        runs: whether it has workers with state, so that pausing it would cost all steps since its last checkpoint.
        before: places allocated by the last plan.
        left: the part of ``before`` that is still usable.
    """

    name: str
    since: float = 0.0
    terms: Terms
    runs: bool
    before: int
    left: int

    @property
    def max_places(self) -> int:
        """Most places that it can use, which may be fewer than its minimum."""
        assert self.terms.max_workers is not None, "a task has no more places than its limit"
        return self.terms.max_workers

    @property
    def plan_name(self) -> str:
        """Name for the planner, which breaks ties by names: that of an older task comes first."""
        return f"{int(self.since * 1e6) + 10**17:018d} {self.name}"


@dataclass(frozen=True, kw_only=True)
class Question:
    """The question how many places each task gets.

    Attributes:
        key: names the situation; the answer repeats it.
        num_places: usable places.
        node_places: places of the largest node, which are lost, or arrive, at the same time.
        tasks: in the order of their creation.
        coming: jobs that will compete as soon as a task, the key, has succeeded.
        parts: places, and the tasks that can use them, of each kind of nodes; empty: all are of one kind.
    """

    key: str
    num_places: int
    node_places: int
    tasks: tuple[Competitor, ...]
    coming: tuple[tuple[str, tuple[Competitor, ...]], ...] = ()
    parts: tuple[tuple[int, frozenset[str]], ...] = ()

    def divided(self) -> list[Question]:
        """Return a question for each kind of nodes."""
        if not self.parts:
            return [self]
        return [
            replace(self, num_places=number, tasks=tuple(t for t in self.tasks if t.name in names), parts=(), coming=())
            for number, names in self.parts
        ]

    def standing(self, allocation: Mapping[str, int]) -> Question:
        """Return the situation in which the answer ``allocation`` is in force."""
        tasks = tuple(
            replace(task, runs=task.runs or places > 0, before=places, left=places)
            for task in self.tasks
            for places in [allocation[task.name]]
        )
        return replace(self, tasks=tasks)

    @property
    def situation(self) -> Question:
        """The question without its name and its future: questions with equal situations have equal answers."""
        return replace(self, key="", coming=())

    def launches(self) -> Iterator[Question]:
        """Iterate over the situations in which a task has succeeded, and the jobs that wait for it compete."""
        for ended, jobs in self.coming:
            tasks = (*(task for task in self.tasks if task.name != ended), *jobs)
            yield replace(self.situation, tasks=tuple(sorted(tasks, key=lambda task: (task.since, task.name))))


class TimerKey(NamedTuple):
    """Name of a timer; setting it again replaces the running one."""

    kind: str
    task: str = ""
    agent: str = ""


RETURN_SECONDS: Final = 3.0
"""Least time in which agents whose connections have ended together may connect again: each tries every 2 s."""
_SILENCE = SilenceLimits(beat=0.5, least=1.2, most=4.5)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Parameters of the machine: time limits in seconds, and switches. See `config` for their reasons."""

    reconnect_grace: float = 0.25
    restart_grace: float = 10.0
    comm_error_grace: float = 0.5
    join_grace: float = 0.5
    pause_grace: float = 300.0
    worker_timeout: float = 10.0
    silence: SilenceLimits = _SILENCE
    health: HealthLimits = field(default_factory=HealthLimits)
    flapping_cuts: int = 3
    flapping_window: float = 300.0
    warm_standby: bool = False
    recovery_time: float = 300.0
    watch: wire.WatchLimits = field(default_factory=wire.WatchLimits)
    mute_time: float = 5.0
    collective_time: float = 10.0
    witness: bool = True
    probe_time: float = 1.5
    degraded_time: float = 10.0
    straggler_factor: float = 1.25
    severity: SeverityLimits = field(default_factory=SeverityLimits)
    patterns: tuple[Pattern, ...] = ()
    nan_loss: str = "tell"
    allow_injection: bool = False
    started_by_agent: bool = False
    exit_when_idle: bool = False
    secret: bytes = b""
    """Random bytes, drawn by the shell at its start, from which the keys of epochs are derived."""
    idle_linger: float = 3.0
    startup_linger: float = 30.0


# ---- inputs --------------------------------------------------------------------------------------------------------


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinator starts, with restored tasks if any. Must be the first input."""

    about: dict[str, Any] = {}
    """Description of the process for the event log."""


class AgentMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message arrived on connection ``conn``. The first one of a connection must be `wire.Register`.

    ``excused``: the coordinator's loop stood still shortly before, so a new connection is no evidence about the link.
    """

    conn: int
    message: wire.FromAgent
    excused: bool = False


class DaemonMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A daemon's message arrived on connection ``conn``. The first one of a connection must be `NodeHello`."""

    conn: int
    message: FromNode


class MessageBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Messages that arrived at the same time, in order; their consequences are derived once, after the last one."""

    received: tuple[AgentMessage | DaemonMessage, ...]


class Disconnected(msgspec.Struct, frozen=True, kw_only=True):
    """Connection ``conn`` has ended; ``silent``: it was closed after that time without a message, in seconds."""

    conn: int
    silent: float | None = None


class AgentsEnded(msgspec.Struct, frozen=True, kw_only=True):
    """Agents known to have ended: no such process on the coordinator's machine. Connected ones are left out."""

    agents: tuple[str, ...]


class Drain(msgspec.Struct, frozen=True, kw_only=True):
    """An operator drains a node, or undrains it."""

    node: str
    drained: bool


class Resize(msgspec.Struct, frozen=True, kw_only=True):
    """An operator wants a task to have this many nodes (None: no preference); the number is valid for the task."""

    task: str
    nodes: int | None


class Calibrate(msgspec.Struct, frozen=True, kw_only=True):
    """An operator wants a task's speed measured at these numbers of nodes; none: stop measuring.

    `calibration.refusal` has accepted it. Each size makes some steps, and is abandoned after some seconds.
    """

    task: str
    sizes: tuple[int, ...] = ()
    steps: int = 0
    seconds: float = 0.0


class Relayout(msgspec.Struct, frozen=True, kw_only=True):
    """An operator wants a task's model spread in this layout; `relayout.refusal` has accepted it."""

    task: str
    layout: wire.Layout


class Submit(msgspec.Struct, frozen=True, kw_only=True):
    """A user submits tasks, all or none of them; `jobs.refusal` has accepted them."""

    jobs: tuple[Job, ...]


class Cancel(msgspec.Struct, frozen=True, kw_only=True):
    """A user wants a running or queued task to end: now, or once its members have written a checkpoint (``save``)."""

    task: str
    save: bool = False


class InjectFault(msgspec.Struct, frozen=True, kw_only=True):
    """An operator injects a fault; `injection.refusal` has accepted it. ``draw``: a random number from 0 to 1."""

    task: str
    fault: Fault
    draw: float


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """The planner's answer to `RequestPlan`: the number of places of each task.

    Attributes:
        key: the key of the question.
        allocation: places by task, 0 for paused tasks.
        waf: F of the allocation [FLOP/s, weighted].
        milliseconds: duration of the computation.
        foreseen: whether the answer was computed before the question.
        layouts: the layout with these places of each task whose job leaves it to the plan, if the planner knows one.
    """

    key: str
    allocation: dict[str, int]
    waf: float = 0.0
    milliseconds: float = 0.0
    foreseen: bool = False
    layouts: dict[str, wire.Layout] = {}


class TimerFired(msgspec.Struct, frozen=True, kw_only=True):
    """A timer set by `SetTimer` has expired."""

    key: TimerKey


class AbsencesDue(msgspec.Struct, frozen=True, kw_only=True):
    """Timers of kind ``lost`` have expired at the same time: they lead to one new epoch of each task."""

    keys: tuple[TimerKey, ...]


Input = Union[
    Started,
    AgentMessage,
    MessageBatch,
    DaemonMessage,
    Disconnected,
    AgentsEnded,
    Drain,
    Resize,
    Calibrate,
    Relayout,
    Submit,
    Cancel,
    InjectFault,
    Planned,
    TimerFired,
    AbsencesDue,
]

# ---- actions -------------------------------------------------------------------------------------------------------


class Send(msgspec.Struct, frozen=True, kw_only=True):
    """Send a message over a connection; dropped if the connection has ended meanwhile."""

    conn: int
    message: wire.ToAgent | ToNode


class Close(msgspec.Struct, frozen=True, kw_only=True):
    """Close a connection after sending pending messages; its end is reported by `Disconnected` as for any other."""

    conn: int
    reason: str


class SetTimer(msgspec.Struct, frozen=True, kw_only=True):
    """Report `TimerFired` after ``seconds``."""

    key: TimerKey
    seconds: float


class CancelTimer(msgspec.Struct, frozen=True, kw_only=True):
    """Cancel a timer; unknown ones are ignored."""

    key: TimerKey


class Emit(msgspec.Struct, frozen=True, kw_only=True):
    """Append to the event log. The shell adds sequence number and time."""

    name: str
    task: str | None
    incident: str | None
    fields: dict[str, Any] = {}
    fact: Fact | None = None
    """The event as a typed value, if accounts depend on it; ``fields`` has the same contents."""


class Save(msgspec.Struct, frozen=True, kw_only=True):
    """The task's state has changed: write it before sending any message of this batch."""

    task: str


class SaveLasting(msgspec.Struct, frozen=True, kw_only=True):
    """`state.Lasting` has changed: write it before sending any message of this batch."""


class Forget(msgspec.Struct, frozen=True, kw_only=True):
    """The task has ended: delete its stored state, keep its events."""

    task: str


class RequestPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Ask the planner for a plan; it answers with `Planned`. A newer question replaces an older one."""

    question: Question


class Strike(msgspec.Struct, frozen=True, kw_only=True):
    """An injected fault: send this process a signal, after all other actions."""

    signal: int


class StopServer(msgspec.Struct, frozen=True, kw_only=True):
    """Stop the server: no task is left to coordinate."""

    reason: str


Action = Union[Send, Close, SetTimer, CancelTimer, Emit, Save, SaveLasting, Forget, RequestPlan, Strike, StopServer]
