"""Messages about health: errors of workers and nodes."""

from __future__ import annotations

from typing import Any

import msgspec

from unicron_lightning.wire.fields import Count, Id, Key, Message, Wall, Word


class ErrorReport(Message, frozen=True, kw_only=True, tag="error_report"):
    """An error, reported by a worker about itself, or by an agent about a worker or its node.

    It is logged once and handled by the severity of its kind. Its consequences (the exit of the process, broken
    connections of its peers) are no separate errors.
    """

    worker: Id | None
    """Worker with the error; None if the node has it."""
    kind: Word
    """A key of `coordinator.severity.record.SEVERITY`; the coordinator takes others for `unnamed_software_error`."""
    cause: str
    """Short readable text."""
    phase: Word
    """The worker's phase: ``compute``, ``reduce``, ...; "" if unknown."""
    step: Count | None
    """Number of optimizer steps that the worker had finished."""
    at: Wall
    """time.time() of the error."""
    details: dict[str, Any]
    """Plain JSON: exception type, last frames, counters, ..."""
    ends: bool = False
    """Whether the error ends the worker's process: it takes part in nothing any more, and need not be killed."""


class GpuReading(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU's state as reported by NVML. Counters are since the agent's start."""

    bus: Key
    """PCI bus id."""
    celsius: float | None = None
    ecc_errors: Count = 0
    """Uncorrectable errors."""
    remap_failed: bool = False
    nvlink_errors: Count = 0
    xids: list[int] = []
    throttled: list[str] = []
    """Reasons for a lowered clock that indicate a fault."""
    error: str = ""
    """NVML's error, if it gave no answer."""


class NodeReading(Message, frozen=True, kw_only=True, tag="node_reading"):
    """State of the agent's machine; unreadable values are omitted."""

    missing: bool = False
    """Whether nothing could be read in time."""
    disk_free_bytes: dict[Key, Count] = msgspec.field(default_factory=dict)
    """By folder."""
    memory_free_percent: float | None = None
    memory_pressure_percent: float | None = None
    """Share of the last ten seconds in which all processes waited for memory (Linux' PSI, full)."""
    gpus: list[GpuReading] = msgspec.field(default_factory=list)
    gpu_error: str = ""


class Barred(Message, frozen=True, kw_only=True, tag="barred"):
    """The agent gets no slot while its node is in this state; "": it may have one."""

    reason: str
