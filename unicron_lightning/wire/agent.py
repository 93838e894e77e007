"""Messages of an agent to the coordinator, beside those that it forwards for its workers."""

from __future__ import annotations

import hashlib
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from unicron_lightning.wire.fields import (
    Code,
    Count,
    Host,
    Id,
    Index,
    Line,
    Message,
    Name,
    Pid,
    Port,
    Secret,
    Size,
    Wall,
    Weight,
    Word,
)
from unicron_lightning.wire.health import NodeReading
from unicron_lightning.wire.memory import StateCopy
from unicron_lightning.wire.replicas import Replicas
from unicron_lightning.wire.worker import WorkerHello, WorkerReady

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
