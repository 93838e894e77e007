"""Messages of the coordinator to an agent, which forwards those marked with [to the workers]."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from unicron_lightning.wire.activity import WatchLimits
from unicron_lightning.wire.agent import Address
from unicron_lightning.wire.checkpoints import Checkpoint
from unicron_lightning.wire.fields import Message
from unicron_lightning.wire.memory import StateOffer
from unicron_lightning.wire.replicas import Layout

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
