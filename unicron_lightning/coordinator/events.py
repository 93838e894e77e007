"""What goes into the coordinator's state machine and what comes out: plain frozen values.

The machine has no clock and does no I/O. The shell (`server.Server`) turns sockets and timers into *inputs* and carries
out the *actions*; tests and simulations do the same without sockets. Those of which a large task makes thousands at a
time are msgspec's structs, which are made in a fifth of the time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Union

import msgspec

from unicron_lightning import wire
from unicron_lightning.coordinator.question import Question
from unicron_lightning.detection.health import HealthLimits
from unicron_lightning.detection.pairs import PairLimits
from unicron_lightning.detection.patterns import Pattern
from unicron_lightning.detection.silence import SilenceLimits
from unicron_lightning.faults.fault import Fault
from unicron_lightning.jobs import Job
from unicron_lightning.nodewire import FromNode, ToNode


class TimerKey(NamedTuple):
    """Name of a timer; setting it again replaces the running one."""

    kind: str
    task: str = ""
    agent: str = ""


_SILENCE = SilenceLimits(beat=0.5, least=1.2, most=4.5)
_HEALTH = HealthLimits()
_PAIRS = PairLimits()


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the machine goes by: time limits in seconds, and switches. See `config` for their reasons."""

    reconnect_grace: float = 0.25
    restart_grace: float = 10.0
    comm_error_grace: float = 0.5
    join_grace: float = 0.5
    worker_timeout: float = 10.0
    silence: SilenceLimits = _SILENCE
    health: HealthLimits = _HEALTH
    pairs: PairLimits = _PAIRS
    flapping_cuts: int = 3
    flapping_window: float = 300.0
    warm_standby: bool = False
    recovery_time: float = 300.0
    watch: wire.WatchLimits = field(default_factory=wire.WatchLimits)
    mute_time: float = 5.0
    collective_time: float = 10.0
    degraded_time: float = 10.0
    straggler_factor: float = 1.25
    reattempt_limit: int = 3
    reattempt_window: float = 300.0
    soon_steps: int = 3
    cordon_failures: int = 4
    cordon_window: float = 3600.0
    crash_attempts: int = 5
    crash_lives: int = 10
    patterns: tuple[Pattern, ...] = ()
    nan_loss: str = "tell"
    allow_injection: bool = False
    exit_when_idle: bool = False
    secret: bytes = b""
    """Drawn by the shell at its start: the keys of epochs follow from it."""
    idle_linger: float = 3.0
    startup_linger: float = 30.0


# ---- inputs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Started:
    """The coordinator begins, with the tasks it was restored with if any. Must be the first input."""

    about: dict[str, Any] = field(default_factory=dict)
    """Goes into the event log."""


class Received(msgspec.Struct, frozen=True, kw_only=True):
    """A message came over connection ``conn``. The first one of a connection must be `wire.Register`."""

    conn: int
    message: wire.FromAgent


@dataclass(frozen=True, kw_only=True)
class NodeSaid:
    """A daemon's message came over connection ``conn``. The first one of a connection must be `nodewire.NodeHello`."""

    conn: int
    message: FromNode


@dataclass(frozen=True, kw_only=True)
class Together:
    """Messages that came at the same time, in their order: what follows from them is found out once, after the last."""

    received: tuple[Received | NodeSaid, ...]


@dataclass(frozen=True, kw_only=True)
class Disconnected:
    """Connection ``conn`` has ended; ``silent``: it was given up after so many seconds without a word."""

    conn: int
    silent: float | None = None


@dataclass(frozen=True, kw_only=True)
class AgentsEnded:
    """Agents known to have ended: no such process on the coordinator's machine. Those connected are left out."""

    agents: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Drain:
    """An operator wants no workers on a node, or allows them again."""

    node: str
    drained: bool


@dataclass(frozen=True, kw_only=True)
class Resize:
    """An operator wants a task to have this many nodes (None: no wish); one of them that it can have."""

    task: str
    nodes: int | None


@dataclass(frozen=True, kw_only=True)
class Relayout:
    """An operator wants a task's model spread like this; `relayout.refusal` has nothing to say."""

    task: str
    layout: wire.Layout


@dataclass(frozen=True, kw_only=True)
class Submit:
    """A user submits a task of which `jobs.refusal` has nothing to say."""

    job: Job


@dataclass(frozen=True, kw_only=True)
class Cancel:
    """A user wants a task that is not over to end now."""

    task: str


@dataclass(frozen=True, kw_only=True)
class Inject:
    """An operator has a fault strike of which `injection.refusal` has nothing to say. ``draw``: from 0 to 1."""

    task: str
    fault: Fault
    draw: float


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The planner's answer to `Ask`: how many places each task shall have.

    Attributes:
        key: the question's.
        allocation: places by task, 0 for those that are paused.
        waf: F of it [FLOP/s, weighted].
        milliseconds: how long the answer took.
        foreseen: whether it was made before it was asked for.
    """

    key: str
    allocation: dict[str, int]
    waf: float = 0.0
    milliseconds: float = 0.0
    foreseen: bool = False


@dataclass(frozen=True, kw_only=True)
class TimerFired:
    """A timer set by `SetTimer` has run out."""

    key: TimerKey


Input = Union[
    Started,
    Received,
    Together,
    NodeSaid,
    Disconnected,
    AgentsEnded,
    Drain,
    Resize,
    Relayout,
    Submit,
    Cancel,
    Inject,
    Planned,
    TimerFired,
]

# ---- actions -------------------------------------------------------------------------------------------------------


class Send(msgspec.Struct, frozen=True, kw_only=True):
    """Send a message over a connection; dropped if the connection has ended meanwhile."""

    conn: int
    message: wire.ToAgent | ToNode


@dataclass(frozen=True, kw_only=True)
class Close:
    """Close a connection after what was sent on it; its end is reported by `Disconnected` as any other."""

    conn: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class SetTimer:
    """Report `TimerFired` in so many seconds."""

    key: TimerKey
    seconds: float


@dataclass(frozen=True, kw_only=True)
class CancelTimer:
    """Forget a timer; unknown ones are ignored."""

    key: TimerKey


@dataclass(frozen=True, kw_only=True)
class Emit:
    """Append to the event log. The shell adds sequence number and time."""

    name: str
    task: str | None
    incident: str | None
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Save:
    """The task's state has changed: write it before anything of this batch is sent."""

    task: str


@dataclass(frozen=True, kw_only=True)
class SaveLasting:
    """`state.Lasting` has changed: write it before anything of this batch is sent."""


@dataclass(frozen=True, kw_only=True)
class Forget:
    """The task has ended: delete its stored state, keep its events."""

    task: str


@dataclass(frozen=True, kw_only=True)
class Ask:
    """Have the planner answer, by `Planned`. A newer question replaces it."""

    question: Question


@dataclass(frozen=True, kw_only=True)
class Strike:
    """A fault on purpose: this process gets a signal, once everything else has been carried out."""

    signal: int


@dataclass(frozen=True, kw_only=True)
class StopServer:
    """Nothing is left to coordinate."""

    reason: str


Action = Union[Send, Close, SetTimer, CancelTimer, Emit, Save, SaveLasting, Forget, Ask, Strike, StopServer]
