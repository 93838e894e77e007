"""Messages between worker, agent and coordinator.

This package is the whole vocabulary of the control plane. Its names are those of this module, except for the
messages of the third link, which `wire.daemon` has. Two links carry it, both as JSON objects with a ``type``
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
from typing import Annotated, Any, Final, Literal, Union

import msgspec
from msgspec import Meta

from unicron_lightning.wire.fields import (
    Code,
    Count,
    Host,
    Id,
    Index,
    Key,
    Line,
    Message,
    Name,
    Pid,
    Port,
    Rate,
    Seconds,
    Secret,
    Size,
    Wall,
    Weight,
    Word,
    check_flags,
    check_numbers,
    check_report,
)
from unicron_lightning.wire.subjects import (
    Barred,
    Checkpoint,
    CheckpointSaved,
    ErrorReport,
    FaultDue,
    FaultRecorded,
    GpuReading,
    Inject,
    Layout,
    NodeReading,
    OpenCopy,
    Peer,
    Probe,
    Probed,
    Replicas,
    Spread,
    StateComplete,
    StateCopy,
    StateGiven,
    StateHeld,
    StateOffer,
    StateStaged,
    StateVersion,
    StateWanted,
)

__all__ = [
    "Barred",
    "Checkpoint",
    "CheckpointSaved",
    "ErrorReport",
    "FaultDue",
    "FaultRecorded",
    "GpuReading",
    "Inject",
    "Layout",
    "Message",
    "NodeReading",
    "OpenCopy",
    "Peer",
    "Probe",
    "Probed",
    "Replicas",
    "Spread",
    "StateComplete",
    "StateCopy",
    "StateGiven",
    "StateHeld",
    "StateOffer",
    "StateStaged",
    "StateVersion",
    "StateWanted",
]
"""Messages of other modules, which have their names here, too."""


class WatchLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits after which a worker is overdue; times in seconds. See `config.schema.DetectionConfig`."""

    factor: float = 3.0
    slack: float = 0.25
    change_time: float = 10.0
    hook_time: float = 60.0
    data_time: float = 300.0
    stall_time: float = 600.0
    start_time: float = 1800.0
    degraded_factor: float = 1.1


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's recent speed, by its own statistics; times in seconds. See `worker.control.statistics.Summary`."""

    steps: Count
    mean: Seconds | None = None
    median: Seconds | None = None
    usual: Seconds | None = None
    slowdown: Rate = 1.0
    """Ratio of the last steps' time to the usual one; 1 if the difference is noise."""
    busy: Seconds | None = None
    """Time of one micro-batch on this rank without waiting."""
    micro_batches: Count = 0
    """Micro-batches of this rank in the last step."""
    phases: dict[Word, Seconds] = {}


class Progress(Message, frozen=True, kw_only=True, tag="progress"):
    """The worker's last finished step; sent by the control thread at most once a second, never on the training path."""

    worker: Id
    step: Count
    metrics: dict[Key, float | None]
    """None represents values without a JSON number: NaN, infinity."""
    at: Wall | None = None
    """time.time() at the end of the step."""
    flops_per_step: Rate | None = None
    """FLOPs of the model in one step of the whole task, if the script specifies them."""
    pace: Pace | None = None
    fit: Count = 0
    """Number of the script's ``fit`` call, from 1, in which steps count anew; 0 if unknown."""
    samples_per_step: Count | None = None
    """Data set items in the global batch of the step."""


class ActivityReport(Message, frozen=True, kw_only=True, tag="activity_report"):
    """Activity of the worker's training thread.

    Sent when the worker becomes overdue, again each second while it is, once when it continues, when it has waited in a
    collective for 1, 2, 4, ... s, and in answer to `ActivityQuery`.
    """

    worker: Id
    epoch: Count
    """Epoch of the worker's world; 0 before the first."""
    step: Count
    """Number of finished optimizer steps."""
    phase: Word
    """See `worker.control.activity.ActivityPhase`."""
    waiting: bool
    """Whether the training thread waits for other ranks in a collective."""
    overdue: bool
    """Whether ``seconds`` exceeds ``limit``."""
    seconds: Seconds
    """Time in the core phases of this step, or in the present part of another phase, without the time in which the
    process was not running.
    """
    limit: Seconds | None
    """Limit of ``seconds``; None without any data."""
    micro_batch: Count | None = None
    waits: Seconds = 0.0
    """Time that the training thread has waited in this collective."""
    position: Count = 0
    """Number of operations that the worker has completed."""
    operation: Word = ""
    """Name of the operation in progress; "" for none."""


class ActivityQuery(Message, frozen=True, kw_only=True, tag="activity_query"):
    """[to the workers] Request for the present activity, answered at once by an `ActivityReport`."""


class Inspect(Message, frozen=True, kw_only=True, tag="inspect"):
    """[to the agent] A worker hangs: collect the stacks of its threads, and report it by `wire.ErrorReport`."""

    worker: str
    cause: str
    phase: str
    step: int | None
    details: dict[str, Any]
    """Added to the report, beside the stacks."""
    silent: bool = False
    """Whether the worker does not answer: it hangs only if its process is frozen, see `agent.workers.inspection`."""
    patient: bool = False
    """Whether a silent worker has been silent for so long that computing with the interpreter's lock counts as
    a hang.
    """
    gentle: bool = False
    """Whether a silent worker may sleep with the interpreter's lock: only a stopped process counts as a hang."""
    kind: Word = "task_hang"
    """Kind of the error to report."""


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
    port: Port = 0
    """On its agent's host, for links of other workers (`Member.port`)."""


class WorkerReady(Message, frozen=True, kw_only=True, tag="worker_ready"):
    """The worker waits: with ``epoch`` 0 to become a member, else it has stopped for that epoch and reports its state.

    ``state`` has ``step`` (optimizer steps finished), ``has_state`` and, with epoch 0, ``founder``: the role in which
    the worker waits. A founder whose role changes sends the message again. For the sum of the members' reports (`Go`)
    it has ``position`` (operations completed), ``operation`` (name of the one in progress), and ``report``: an object
    with lists of numbers ``finished`` (micro-batches, or batches) and ``reduced`` (buckets), either may be missing. The
    rest of ``report`` is opaque to the coordinator.
    """

    worker: Id
    epoch: Count
    state: dict[str, Any]

    def __post_init__(self) -> None:
        check_numbers(self.state, "step", "position")
        check_flags(self.state, "has_state", "founder")
        check_report(self.state)


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


class Imported(Message, frozen=True, kw_only=True, tag="imported"):
    """The worker's script has imported torch; sent with the hello by workers that were not forked.

    The message stays on the UNIX socket: the agent decides with it whether later workers can be forked.
    """

    worker: str
    changed: tuple[str, ...]
    """Names of variables that the script had set or removed before its imports of torch and Lightning."""
    lightning: bool = True
    """Whether the script has imported Lightning, too."""


# ---- records: values that workers leave for later workers of the task -------------------------------------


class Record(Message, frozen=True, kw_only=True, tag="record"):
    """Keep ``value`` (JSON text) under ``key`` for the task's present life, for workers that join later.

    An agent repeats records after a broken connection, so that one of an earlier epoch may follow one of a later.
    """

    key: Key
    value: str
    lasting: bool = False
    """Keep it for later lives, too."""
    epoch: Count = 0
    """Epoch of the worker's world; 0 if unknown."""


class Lookup(Message, frozen=True, kw_only=True, tag="lookup"):
    """Request a recorded value. Answered by `LookupReply` with the same ``worker`` and ``key``."""

    worker: Id
    key: Key


class LookupReply(Message, frozen=True, kw_only=True, tag="lookup_reply"):
    """[to the worker] ``value`` is None if nothing is recorded."""

    worker: str
    key: str
    value: str | None


PROTOCOL_VERSION: Final = 6


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Address of a TCPStore server."""

    host: Host
    port: Port


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A live worker as known to its agent, sent with each registration so that a restarted coordinator can continue."""

    worker: Id
    local_rank: Index
    hello: WorkerHello | None = None
    ready: WorkerReady | None = None
    """The last `WorkerReady`, if no newer epoch was seen since."""
    replicas: Replicas | None = None
    """The last `Replicas` of the worker."""
    member: bool = False
    """Whether it has sent a `WorkerReady` of an epoch."""

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
    went: Count = 0
    """Newest epoch whose `Go` it has received; 0 if none."""
    slot: Name | None = None
    """Name of the accelerators on its node that the agent's workers use; None if no other agent uses them.

    Among agents that name the same slot, those of at most one task have workers at a time.
    """
    weight: Weight = 1.0
    """w(t), the value of the task's FLOPs relative to those of other tasks."""
    rack: Name | None = None
    """Label of what its node shares with others and can be lost with, e.g. a rack or switch."""
    warm: bool = False
    """Whether only a warm grant of ``round`` has arrived, so that the workers do not belong to the task yet."""
    reading: NodeReading | None = None
    """Newest reading of its machine."""
    copies: tuple[StateCopy, ...] = ()
    """Copies of the task's state in its memory."""
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


class EpochWanted(Message, frozen=True, kw_only=True, tag="epoch_wanted"):
    """The agent could not apply an `EpochChange`. Answered by the whole `Epoch`, and by its `Go` if it is settled."""

    epoch: Count
    """Newest epoch that the agent has; 0 if none."""


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
    output: Annotated[tuple[Line, ...], Meta(max_length=20)] = ()
    """Last lines of output of a worker that ended before its hello."""


class Beat(Message, frozen=True, kw_only=True, tag="beat"):
    """[both ways] The link works. An agent sends it as often as `Registered` requires; the coordinator answers each."""


class Departing(Message, frozen=True, kw_only=True, tag="departing"):
    """The agent was asked to end (SIGTERM): its workers are to leave at the next step boundary. Answered by `Stop`."""


class Bye(Message, frozen=True, kw_only=True, tag="bye"):
    """The agent exits, having stopped its workers."""

    succeeded: bool


EpochKind = Literal["init", "fail", "join", "leave", "pause", "relayout", "restart"]
PLANNED: Final = ("join", "leave", "pause", "relayout")
"""Kinds of epochs that are entered at a step boundary; until then the members of the previous epoch continue."""
PARTING: Final = ("pause", "relayout")
"""Kinds of epochs whose members write a checkpoint and wait to be stopped."""


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of an epoch; its place in the epoch's list is its global rank."""

    worker: str
    agent: str
    node: str
    host: str
    local_rank: int
    rack: str = ""
    """Label of what the node shares with others and can be lost with, e.g. a rack or switch; "": with none."""
    port: int = 0
    """On ``host``, for links of other members."""


class Registered(Message, frozen=True, kw_only=True, tag="registered"):
    """The session is established. Repeated with other intervals when the number of agents has changed much."""

    coordinator: str
    worker_timeout: float | None = None
    """Seconds without a heartbeat after which a worker is declared dead, for agents without a user's value."""
    beat: float | None = None
    """Seconds between the agent's beats; None: it need not send any."""
    least_silence: float = 1.2
    """Least and most seconds without a message after which either side closes the connection."""
    most_silence: float = 4.5
    progress: float = 0.0
    """Least seconds between two reports of a worker's progress."""
    started_by_agent: bool = False
    """Whether an agent started the coordinator, so that agents replace it when it dies; else an operator does."""


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
    needed: bool = False
    """Whether the task cannot continue without an agent that departs."""


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

    ``resume``: checkpoints of the task, newest first. A task without surviving workers resumes from the first one that
    is as it was written; empty for a new start. ``layout``: an operator's order, which replaces the script's layout.
    """

    worker: str
    founder: bool
    life: int
    """Number of the task's starts: 1, and one more after each loss of all members."""
    resume: tuple[Checkpoint, ...]
    watch: WatchLimits = WatchLimits()
    layout: Layout | None = None
    memory: tuple[StateOffer, ...] = ()
    """Versions in agents' memory that are at least as new as `resume`, newest first: they are tried before it."""
    run: Annotated[str, Meta(pattern=r"^[0-9a-f]{0,64}\Z")] = ""
    """The same in all lives of the task, and another one if a task of this name is begun again after its end."""


class Epoch(Message, frozen=True, kw_only=True, tag="epoch"):
    """[to the workers: all members, and old members that are no longer in it] The newest world of the task.

    ``init``/``restart``: no worker has state, all members start. ``fail``: stop *now*, abort collectives. ``join``,
    ``leave``: switch at the next step boundary. ``relayout``: do so, write a checkpoint there, and wait to be stopped:
    the task restarts from it in another layout. ``pause``: the same, and the task gets no node for a while. In each
    case answer with `WorkerReady` of this epoch and wait for `Go`. A former member that is not in ``members`` has been
    expelled. In a ``leave`` it first takes part in the step, then
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


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """A member that an epoch has and its base has not; ``rank`` is its place in the new epoch."""

    rank: int
    member: Member


class EpochChange(Message, frozen=True, kw_only=True, tag="epoch_change"):
    """[to the agent] The newest world as its difference from epoch ``base``, which the agent was sent before.

    The agent derives the `Epoch` from it (`epoch_changes.changed`) and forwards that. If it does not have the base, or
    the digest differs, it requests the whole (`EpochWanted`). Members that stay keep their order.
    """

    base: int
    left: list[int]
    """Ranks in the base of the members that are no longer in the epoch, ascending."""
    came: list[Arrival]
    """By rank, ascending."""
    digest: str
    """`epoch_changes.digest_of` the new list of members."""
    number: int
    kind: EpochKind
    store: Address
    hold: bool
    incident: str | None
    published_at: float
    key: str


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Members of an epoch that are at one place of their programs."""

    position: int | None
    """Operations that they have completed; None: they have no state yet."""
    operation: str
    """Name of the operation in progress."""
    first: int
    """Lowest rank of them."""
    count: int


class Holders(msgspec.Struct, frozen=True, array_like=True):
    """Neighbouring buckets whose reduction is complete on the same number of members, with the same lowest rank."""

    bucket: int
    """First one."""
    buckets: int
    first: int
    """Lowest rank that holds them."""
    count: int
    """Number of members that hold each."""


class Go(Message, frozen=True, kw_only=True, tag="go"):
    """[to the workers] All members of the epoch are ready: connect.

    Contains the sum of their reports (`report_sums.summed`). ``finished`` and ``reduced`` are those of members that
    are furthest.
    """

    epoch: int
    standings: tuple[Standing, ...] = ()
    finished: tuple[int, ...] = ()
    """Finished micro-batches, or batches, as lengths of runs: missing ones from 0, finished ones, and so on."""
    reduced: tuple[Holders, ...] = ()


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
    ActivityReport,
    Replicas,
]
FromWorker = Union[Forwarded, Heartbeat, Imported, Training, StateWanted]
ToWorker = Union[Welcome, Epoch, Go, LookupReply, TaskOver, Notice, FaultRecorded, Inject, ActivityQuery, StateGiven]
FromAgent = Union[
    Beat,
    NodeReading,
    Register,
    RendezvousBegin,
    LocalWorld,
    EpochWanted,
    StoreUsed,
    WorkerDied,
    Departing,
    Bye,
    Probed,
    StateHeld,
    Forwarded,
]
ToAgent = Union[
    Beat,
    Barred,
    Registered,
    Refused,
    Grant,
    Ranks,
    Stop,
    Fence,
    Inspect,
    Probe,
    EpochChange,
    StateComplete,
    ToWorker,
]

encode = msgspec.json.Encoder().encode
decode_from_worker = msgspec.json.Decoder(FromWorker).decode
decode_to_worker = msgspec.json.Decoder(ToWorker).decode
decode_from_agent = msgspec.json.Decoder(FromAgent).decode
decode_to_agent = msgspec.json.Decoder(ToAgent).decode
decode_staged = msgspec.json.Decoder(StateStaged).decode
