"""Messages of the online statistics: how fast workers are, and what they are doing when they are overdue.

Part of `wire`, which is where they are used from.
"""

from __future__ import annotations

from typing import Any

import msgspec

from unicron_lightning.fields import Count, Id, Key, Rate, Seconds, Wall, Word
from unicron_lightning.message import Message


class WatchLimits(msgspec.Struct, frozen=True, kw_only=True):
    """After how long a worker is overdue; times in seconds. See `config.schema.DetectionConfig`."""

    factor: float = 3.0
    slack: float = 0.25
    change_time: float = 10.0
    hook_time: float = 60.0
    data_time: float = 300.0
    stall_time: float = 600.0
    start_time: float = 1800.0
    degraded_factor: float = 1.1


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How fast a worker has been lately, by its own statistics; times in seconds. See `worker.statistics.Summary`."""

    steps: Count
    mean: Seconds | None = None
    median: Seconds | None = None
    usual: Seconds | None = None
    slowdown: Rate = 1.0
    """How many times longer than usual the last steps took; 1 if that is noise."""
    busy: Seconds | None = None
    """What one micro-batch takes this rank, waiting left out."""
    micro_batches: Count = 0
    """Of this rank in the last step."""
    phases: dict[Word, Seconds] = {}


class Progress(Message, frozen=True, kw_only=True, tag="progress"):
    """What the worker last finished; sent by the control thread at most once a second. Never on the training path."""

    worker: Id
    step: Count
    metrics: dict[Key, float | None]
    """None stands for what JSON has no number for: NaN, infinity."""
    at: Wall | None = None
    """time.time() at the end of the step."""
    flops_per_step: Rate | None = None
    """FLOPs of the model in one step of the whole task, if the script tells."""
    pace: Pace | None = None


class Doing(Message, frozen=True, kw_only=True, tag="doing"):
    """What the worker's training thread does: told when it is overdue, again each second while it is, once when it
    goes on, and in answer to `Ask`.
    """

    worker: Id
    epoch: Count
    """Of the world it trains in; 0 before the first."""
    step: Count
    """Optimizer steps finished."""
    phase: Word
    """See `worker.activity.Phase`."""
    waiting: bool
    """It waits for other ranks, in a collective."""
    overdue: bool
    """It has been at it for longer than ``limit``."""
    seconds: Seconds
    """How long: in the core phases of this step, or in the present part of another phase. The time in which the process
    could not run is left out."""
    limit: Seconds | None
    """Of ``seconds``; None: nothing is known to judge by."""
    micro_batch: Count | None = None


class Ask(Message, frozen=True, kw_only=True, tag="ask"):
    """[to the workers] What are you doing? Answered by `Doing`, by the control thread, at once."""


class Inspect(Message, frozen=True, kw_only=True, tag="inspect"):
    """[to the agent] A worker hangs: take down the stacks of its threads, and tell of it by `wire.ErrorReport`."""

    worker: str
    cause: str
    phase: str
    step: int | None
    details: dict[str, Any]
    """Goes into the report, beside the stacks."""
    silent: bool = False
    """The worker does not answer: it hangs only if its process is frozen, see `detection.frozen`."""
    patient: bool = False
    """Of a silent one: it has been waited for so long that computing with the interpreter's lock counts as well."""
