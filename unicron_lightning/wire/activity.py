"""Messages of the online statistics: speeds of workers, and the activity of overdue ones."""

from __future__ import annotations

from typing import Any

import msgspec

from unicron_lightning.wire.fields import Count, Id, Key, Message, Rate, Seconds, Wall, Word


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
