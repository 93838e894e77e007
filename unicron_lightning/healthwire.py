"""Messages about health: what is wrong with workers and nodes. Part of the vocabulary of `wire`."""

from __future__ import annotations

from typing import Any

import msgspec

from unicron_lightning.fields import Count, Id, Key, Wall, Word
from unicron_lightning.message import Message


class ErrorReport(Message, frozen=True, kw_only=True, tag="error_report"):
    """Something is wrong: told by a worker of itself, or by an agent of a worker or of its node.

    It is logged once and answered by the severity of its kind. Whatever follows from it (the exit of the process,
    broken connections of its peers) is no error of its own.
    """

    worker: Id | None
    """Whose error it is; None: the node's."""
    kind: Word
    """One of `coordinator.severity.errors.KINDS`. To a coordinator that does not know it: `unnamed_software_error`."""
    cause: str
    """For people, short."""
    phase: Word
    """What the worker was doing: ``compute``, ``reduce``, ...; "" if not known."""
    step: Count | None
    """Optimizer steps that it had finished."""
    at: Wall
    """time.time() when it happened."""
    details: dict[str, Any]
    """Plain JSON: exception type, last frames, counters, ..."""
    ends: bool = False
    """The worker's process is about to end by it: it takes part in nothing any more, and nobody need kill it."""


class GpuReading(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU, as NVML sees it. Counters are since the agent's start."""

    bus: Key
    """PCI bus id."""
    celsius: float | None = None
    ecc_errors: Count = 0
    """Uncorrectable ones."""
    remap_failed: bool = False
    nvlink_errors: Count = 0
    xids: list[int] = []
    throttled: list[str] = []
    """Why its clock is lowered, where that means trouble."""
    error: str = ""
    """What NVML said instead of an answer."""


class NodeReading(Message, frozen=True, kw_only=True, tag="node_reading"):
    """How the agent's machine is; what could not be read is left out."""

    missing: bool = False
    """Nothing could be read in time."""
    disk_free_bytes: dict[Key, Count] = msgspec.field(default_factory=dict)
    """By folder."""
    memory_free_percent: float | None = None
    memory_pressure_percent: float | None = None
    """Of the last ten seconds, in which all processes waited for memory (Linux' PSI, full)."""
    gpus: list[GpuReading] = msgspec.field(default_factory=list)
    gpu_error: str = ""


class Barred(Message, frozen=True, kw_only=True, tag="barred"):
    """The agent gets no slot as long as its node is as it is; "": it may have one."""

    reason: str
