"""Messages of a worker to its agent, which forwards all but `Heartbeat` and `Training` to the coordinator."""

from __future__ import annotations

from typing import Any

from unicron_lightning.wire.fields import (
    Count,
    Id,
    Index,
    Key,
    Message,
    Pid,
    Port,
    Size,
    Wall,
    Word,
    check_flags,
    check_numbers,
    check_report,
)


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
