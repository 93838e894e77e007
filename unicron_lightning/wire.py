"""Messages between worker, agent and coordinator.

This module is the whole vocabulary of the control plane. Two links carry it, both as JSON objects with a ``type``
field:

* **agent <-> coordinator**: one persistent WebSocket per agent (text frames, one message a frame).
* **worker <-> agent**: one UNIX stream socket per worker (one message a line).

A worker never communicates with the coordinator directly: its agent forwards its messages and adds nothing but its own
identity, which is known from the connection. Everything received is decoded into a frozen struct and refused if it does
not fit; nothing is ever unpickled. Unknown fields are ignored, so that a newer peer may send more.

Identity: an *agent* is ``<node>-<8 hex>``, new for every torchrun process. A *worker* is ``<agent>/<local
rank>#<round>`` where the round counts the agent's rendezvous: a restarted worker is a new worker.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final, Literal, Union

import msgspec

from unicron_lightning.faultwire import FaultDue as FaultDue
from unicron_lightning.faultwire import FaultNoted as FaultNoted
from unicron_lightning.faultwire import Inject as Inject
from unicron_lightning.fields import (
    Code,
    Count,
    Host,
    Id,
    Index,
    Name,
    Path,
    Pid,
    Port,
    Secret,
    Size,
    Wall,
    Weight,
    Word,
    check_flags,
    check_numbers,
)
from unicron_lightning.healthwire import Barred as Barred
from unicron_lightning.healthwire import ErrorReport as ErrorReport
from unicron_lightning.healthwire import GpuReading as GpuReading
from unicron_lightning.healthwire import NodeReading as NodeReading
from unicron_lightning.message import Message as Message
from unicron_lightning.pairwire import PairConnect as PairConnect
from unicron_lightning.pairwire import PairEnd as PairEnd
from unicron_lightning.pairwire import PairResult as PairResult
from unicron_lightning.pairwire import PairServe as PairServe
from unicron_lightning.pairwire import PairServing as PairServing
from unicron_lightning.probewire import Peer as Peer
from unicron_lightning.probewire import Probe as Probe
from unicron_lightning.probewire import Probed as Probed
from unicron_lightning.recordwire import Lookup as Lookup
from unicron_lightning.recordwire import LookupReply as LookupReply
from unicron_lightning.recordwire import Record as Record
from unicron_lightning.replicawire import Layout as Layout
from unicron_lightning.replicawire import Replicas as Replicas
from unicron_lightning.replicawire import Spread as Spread
from unicron_lightning.watchwire import Ask as Ask
from unicron_lightning.watchwire import Doing as Doing
from unicron_lightning.watchwire import Inspect as Inspect
from unicron_lightning.watchwire import Pace as Pace
from unicron_lightning.watchwire import Progress as Progress
from unicron_lightning.watchwire import WatchLimits as WatchLimits

PROTOCOL_VERSION: Final = 1

EpochKind = Literal["init", "fail", "join", "leave", "relayout", "restart"]
PLANNED: Final = ("join", "leave", "relayout")
"""Kinds of epochs that are entered at a step boundary; until then the members of the previous epoch continue."""


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of an epoch; its place in the epoch's list is its global rank."""

    worker: str
    agent: str
    node: str
    host: str
    local_rank: int


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Address of a TCPStore server."""

    host: Host
    port: Port


# ---- worker -> agent (the agent forwards all but Heartbeat) --------------------------------------------------------


class WorkerHello(Message, frozen=True, kw_only=True, tag="worker_hello"):
    """The Unicron strategy runs in this worker, so the task recovers in process.

    Answered by `Welcome`: at once if its agent has a slot, else as soon as it gets one.
    """

    worker: Id
    local_rank: Index
    pid: Pid
    capacity: Size
    """Most workers that the task can use: its micro-batches per step."""
    granularity: Size | None = None
    """Workers of a replica, if the model is spread over several; `Replicas` then follows."""


class WorkerReady(Message, frozen=True, kw_only=True, tag="worker_ready"):
    """The worker waits: with ``epoch`` 0 to become a member, else it has stopped for that epoch and reports its state.

    ``state`` is opaque to the coordinator except for ``step`` (optimizer steps finished, int), ``has_state`` (bool)
    and, with epoch 0, ``founder`` (bool): the role in which the worker waits. A founder whose role changes sends the
    message again.
    """

    worker: Id
    epoch: Count
    state: dict[str, Any]

    def __post_init__(self) -> None:
        check_numbers(self.state, "step")
        check_flags(self.state, "has_state", "founder")


class CommError(Message, frozen=True, kw_only=True, tag="comm_error"):
    """A collective of this epoch failed and no newer epoch explains the failure."""

    worker: Id
    epoch: Count
    error: str


class WorkerEvent(Message, frozen=True, kw_only=True, tag="worker_event"):
    """A line for the event log, e.g. ``recovered`` or ``joined``, with plain JSON fields; ``at`` is time.time()."""

    worker: Id
    name: Word
    at: Wall
    fields: dict[str, Any]

    def __post_init__(self) -> None:
        check_numbers(self.fields, "step", "epoch")


class CheckpointSaved(Message, frozen=True, kw_only=True, tag="checkpoint_saved"):
    """A persistent checkpoint is complete at ``path`` (absolute) and holds the state after ``step`` optimizer steps.

    ``parting``: all members wait to be restarted from it; see `Epoch` of kind ``relayout``.
    """

    worker: Id
    path: Path
    step: Count
    parting: bool = False


class WorkerDone(Message, frozen=True, kw_only=True, tag="worker_done"):
    """The worker's program is about to end successfully: its exit is no failure."""

    worker: Id


class Training(Message, frozen=True, kw_only=True, tag="training"):
    """A run of a trainer (``fit``, ``validate``, ...) has begun or ended in the worker.

    The message stays on the UNIX socket: the agent treats an exit status 0 within a run as a failure.
    """

    worker: str
    active: bool


class Heartbeat(Message, frozen=True, kw_only=True, tag="heartbeat"):
    """The worker's control thread runs. Stays on the UNIX socket; without it the agent declares the worker dead."""


# ---- agent -> coordinator -----------------------------------------------------------------------------------------


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A live worker as known to its agent, sent with each registration so that a restarted coordinator can continue."""

    worker: Id
    local_rank: Index
    hello: WorkerHello | None = None
    ready: WorkerReady | None = None
    """The last `WorkerReady`, if no newer epoch was seen since."""
    replicas: Replicas | None = None
    """The last `Replicas` of the worker."""

    def __post_init__(self) -> None:
        for said in (self.hello, self.ready):
            if said is not None and said.worker != self.worker:
                raise ValueError(f"expected a {type(said).__name__} of {self.worker!r}, got one of {said.worker!r}")


class Register(Message, frozen=True, kw_only=True, tag="register"):
    """First message of every connection of an agent, new or resumed. Answered by `Registered` or `Refused`."""

    protocol: int
    task: Name
    agent: Id
    node: Name
    host: Host
    pid: Pid
    min_nodes: int
    max_nodes: int
    round: Count
    """The agent's rendezvous count; 0 before its first."""
    waiting: bool
    """Whether the agent now waits in next_rendezvous for a grant of ``round``."""
    granted: bool
    """Whether the grant of ``round`` has arrived, and not only a warm one."""
    store: Address | None
    local_world: Size | None
    workers: list[WorkerInfo]
    epoch: Count
    """Newest epoch seen by the agent; 0 if none."""
    slot: Name | None = None
    """Name of the accelerators on its node that the agent's workers use; None if no other agent uses them.

    Among agents that name the same slot, those of at most one task have workers at a time.
    """
    weight: Weight = 1.0
    """w(t), the value of the task's FLOPs relative to those of other tasks."""
    warm: bool = False
    """Whether only a warm grant of ``round`` has arrived, so that the workers do not belong to the task yet."""
    reading: NodeReading | None = None
    """Newest reading of its machine."""
    secret: Secret = ""
    """Random, known to this agent's process alone: a registration with another secret is not from this agent.

    Inside the coordinator it is replaced by its SHA-256, see `sealed`.
    """


def sealed(message: Register) -> Register:
    """Return the registration with the digest of its secret in place of the secret, as stored and possibly logged."""
    return msgspec.structs.replace(message, secret=hashlib.sha256(message.secret.encode()).hexdigest())


class RendezvousBegin(Message, frozen=True, kw_only=True, tag="rendezvous"):
    """The agent entered next_rendezvous: all its workers are stopped and it requests a grant for ``round``."""

    round: Count
    store: Address
    """A new, empty TCPStore of this agent for this round."""


class LocalWorld(Message, frozen=True, kw_only=True, tag="local_world"):
    """Number of workers that the agent starts in this round. Answered by `Ranks`."""

    round: Count
    size: Size


class StoreUsed(Message, frozen=True, kw_only=True, tag="store_used"):
    """Workers wrote to the round's store without a hello: the script is a plain one (``init_process_group`` by
    env://).
    """

    round: Count


class WorkerDied(Message, frozen=True, kw_only=True, tag="worker_died"):
    """A worker has died. ``cause``: exit | signal | silent (declared dead); ``code``: exit status or signal."""

    worker: Id
    cause: Literal["exit", "signal", "silent"]
    code: Code
    at: Wall
    kind: Word | None = None
    """Kind of the error if it is more than an abnormal exit: ``out_of_memory``."""
    meaning: str = ""
    """Readable text: ``signal 11 (SIGSEGV): it touched memory that is not its own, core dumped``."""


class Beat(Message, frozen=True, kw_only=True, tag="beat"):
    """[both ways] The link works. An agent sends it as often as `Registered` requires; the coordinator answers each."""


class Bye(Message, frozen=True, kw_only=True, tag="bye"):
    """The agent exits, having stopped its workers."""

    succeeded: bool


# ---- coordinator -> agent (to its workers where marked) ------------------------------------------------------------


class Registered(Message, frozen=True, kw_only=True, tag="registered"):
    """The session is established."""

    coordinator: str
    worker_timeout: float | None = None
    """Seconds without a heartbeat after which a worker is declared dead, for agents without a user's value."""
    beat: float | None = None
    """Seconds between the agent's beats; None: it need not send any."""
    least_silence: float = 1.2
    """Least and most seconds without a message after which either side closes the connection."""
    most_silence: float = 4.5


class Refused(Message, frozen=True, kw_only=True, tag="refused"):
    """The agent cannot take part; the reason is for the user. Permanent: the agent exits."""

    reason: str


class Grant(Message, frozen=True, kw_only=True, tag="grant"):
    """The slot belongs to the task: start workers. ``master`` is the store of group rank 0's agent for plain scripts.

    A ``warm`` grant gives no slot: the workers are started, send hello, and wait for their `Welcome`. It is followed by
    a grant for the same round that gives the slot, by `Stop` or by `TaskOver`.
    """

    round: int
    group_rank: int
    group_world: int
    """For a warm grant: numbers that no other agent has at the moment; the strategy ignores them."""
    master: Address
    warm: bool = False


class Ranks(Message, frozen=True, kw_only=True, tag="ranks"):
    """First global rank of the agent's workers, and the world size, at present."""

    round: int
    base: int
    world: int


class Stop(Message, frozen=True, kw_only=True, tag="stop"):
    """Stop the workers and rendezvous again (plain scripts after a membership change; a revoked slot)."""

    reason: str
    seconds: float | None = None
    """Workers that have not stopped by then are killed; None: after the time that the agent's user chose."""


class Fence(Message, frozen=True, kw_only=True, tag="fence"):
    """Send SIGKILL to this worker: it no longer belongs to the task. A worker unknown to the agent is ignored."""

    worker: str
    reason: str


class TaskOver(Message, frozen=True, kw_only=True, tag="task_over"):
    """[also to workers] The task has ended.

    After a success, workers that are not members exit; otherwise (it failed, or was cancelled) all workers exit at
    once.
    """

    succeeded: bool
    reason: str = ""
    """Reason of a failure, for the user."""


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """[to the worker] Answer to `WorkerHello`. A founder takes part from the start; others join live when ready.

    ``resume``: checkpoint path from which a task without surviving workers resumes, None for a new start. ``layout``:
    an operator's order, which replaces the script's layout.
    """

    worker: str
    founder: bool
    life: int
    """Number of the task's starts: 1, and one more after each loss of all members."""
    resume: str | None
    watch: WatchLimits = WatchLimits()
    layout: Layout | None = None


class Epoch(Message, frozen=True, kw_only=True, tag="epoch"):
    """[to the workers: all members, and old members that are no longer in it] The newest world of the task.

    ``init``/``restart``: no worker has state, all members start. ``fail``: stop *now*, abort collectives. ``join``,
    ``leave``: switch at the next step boundary. ``relayout``: do so, write a checkpoint there, and wait to be stopped:
    the task restarts from it in another layout. In each case answer with `WorkerReady` of this epoch and wait for `Go`.
    A former member that is not in ``members`` has been expelled. In a ``leave`` it first takes part in the step, then
    answers too, and waits to be stopped, or for a newer epoch if the change is cancelled.
    """

    number: int
    kind: EpochKind
    members: list[Member]
    store: Address
    hold: bool
    """Fewer nodes than the minimum: finish the step, then wait at the boundary for a newer epoch."""
    incident: str | None
    published_at: float
    key: str = ""
    """Part of the names under which the members meet in the store; unpredictable for others."""


class Go(Message, frozen=True, kw_only=True, tag="go"):
    """[to the workers] All members of the epoch are ready, with these states by worker: connect."""

    epoch: int
    states: dict[str, dict[str, Any]]


class Notice(Message, frozen=True, kw_only=True, tag="notice"):
    """[to the workers] A line of the task's event log, for callbacks that show it; no decision depends on it.

    ``at`` is the coordinator's time.time().
    """

    name: str
    at: float
    incident: str | None
    fields: dict[str, Any]


Forwarded = Union[
    WorkerHello,
    WorkerReady,
    CommError,
    Progress,
    WorkerEvent,
    Record,
    Lookup,
    CheckpointSaved,
    WorkerDone,
    ErrorReport,
    FaultDue,
    Doing,
    Replicas,
]
FromWorker = Union[Forwarded, Heartbeat, Training]
ToWorker = Union[Welcome, Epoch, Go, LookupReply, TaskOver, Notice, FaultNoted, Inject, Ask]
FromPair = Union[PairServing, PairResult]
ToPair = Union[PairServe, PairConnect, PairEnd]
FromAgent = Union[
    Beat, NodeReading, Register, RendezvousBegin, LocalWorld, StoreUsed, WorkerDied, Bye, FromPair, Probed, Forwarded
]
ToAgent = Union[Beat, Barred, Registered, Refused, Grant, Ranks, Stop, Fence, Inspect, Probe, ToPair, ToWorker]

encode = msgspec.json.Encoder().encode
decode_from_worker = msgspec.json.Decoder(FromWorker).decode
decode_to_worker = msgspec.json.Decoder(ToWorker).decode
decode_from_agent = msgspec.json.Decoder(FromAgent).decode
decode_to_agent = msgspec.json.Decoder(ToAgent).decode
