"""Problems of a node, derived from its agent's readings; and kinds of errors by message. Pure.

The kinds are a table of patterns, data and not code (patterns.yaml).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from unicron_lightning import wire
from unicron_lightning.errors import ConfigError

UNKNOWN: Final = "other_software_error"
"""Kind of messages that match no pattern: a program's own error."""
_SEARCHED_CHARACTERS: Final = 20_000


class Pattern(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of the table.

    Raises:
        ConfigError: ``pattern`` is no regular expression.
    """

    pattern: str
    """A regular expression of Python, searched in messages."""
    kind: str
    """One of `coordinator.severity.record.SEVERITY`."""
    name: str = "own"

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ConfigError(f"pattern {self.pattern!r} of kind {self.kind}: {error}") from None

    def found_in(self, text: str) -> bool:
        """Whether the text matches."""
        return re.search(self.pattern, text) is not None


def classify(texts: Sequence[str]) -> Pattern | None:
    """Return the first matching pattern of the built-in table.

    Args:
        texts: ``TYPE: message`` of an exception, then of its causes: the first text with a match counts.
    """
    for text in texts:
        for pattern in builtin():
            if pattern.found_in(text[:_SEARCHED_CHARACTERS]):
                return pattern
    return None


@functools.cache
def builtin() -> tuple[Pattern, ...]:
    """Load the table of this package."""
    data = Path(__file__).with_name("patterns.yaml").read_bytes()
    return tuple(msgspec.yaml.decode(data, type=list[Pattern]))


_GIB: Final = 1 << 30


@dataclass(kw_only=True)
class HealthLimits:
    """Limits of a healthy node; 0 switches a check off. The group ``health`` of the configuration inherits them, so
    that they are not frozen: Hydra cannot override values of a frozen schema.
    """

    disk_free: float = 0.1
    """Minimum GiB free in the folder for temporary files, and where the agent runs: with less, no workers start."""
    memory_free: float = 2.0
    """Minimum percent of the host's memory that is available: with less, no workers start."""
    memory_pressure: float = 50.0
    """Maximum percent of the last ten seconds in which all processes waited for memory: more is reported."""
    gpu_temperature: float = 90.0
    """Maximum temperature in degrees Celsius: more is reported."""
    nvlink_errors: int = 1
    """Number of recoveries of a GPU's link, since the agent started, for which the node is cordoned."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A problem of a node.

    Attributes:
        check: the check that found it, with the device if there is one: the same problem has the same name.
        kind: kind of the error.
        cause: readable cause.
        bars: whether no workers may be started there meanwhile.
    """

    check: str
    kind: str
    cause: str
    bars: bool


def problems(reading: wire.NodeReading, limits: HealthLimits) -> list[Problem]:
    """Return all problems."""
    found = []
    if reading.missing:
        found.append(Problem(check="reading", kind="node_degraded", cause="its health could not be read", bars=True))
    for path, free in reading.disk_free_bytes.items():
        if free < limits.disk_free * _GIB:
            cause = f"{free / _GIB:.2f} GiB free in {path}; expected {limits.disk_free:g}"
            found.append(Problem(check=f"disk {path}", kind="node_degraded", cause=cause, bars=True))
    free_percent, pressure = reading.memory_free_percent, reading.memory_pressure_percent
    if free_percent is not None and free_percent < limits.memory_free:
        cause = f"{free_percent:.1f} % of memory available; expected {limits.memory_free:g}"
        found.append(Problem(check="memory", kind="node_degraded", cause=cause, bars=True))
    if pressure is not None and 0 < limits.memory_pressure < pressure:
        cause = f"all processes waited for memory {pressure:.0f} % of the last 10 s"
        found.append(Problem(check="memory pressure", kind="node_degraded", cause=cause, bars=False))
    if reading.gpu_error:
        known = classify([reading.gpu_error])
        kind = "gpu_driver_error" if known is None else known.kind
        found.append(Problem(check="driver", kind=kind, cause=reading.gpu_error, bars=True))
    for gpu in reading.gpus:
        found += _of_gpu(gpu, limits)
    return found


def _of_gpu(gpu: wire.GpuReading, limits: HealthLimits) -> list[Problem]:
    def problem(check: str, kind: str, cause: str, *, bars: bool) -> Problem:
        return Problem(check=f"{check} of GPU {gpu.bus}", kind=kind, cause=f"GPU {gpu.bus}: {cause}", bars=bars)

    found = []
    if gpu.error:
        known = classify([gpu.error])
        kind = "gpu_driver_error" if known is None else known.kind
        found.append(problem("access", kind, gpu.error, bars=True))
    if gpu.ecc_errors:
        found.append(problem("ECC", "ecc_error", f"{gpu.ecc_errors} uncorrectable ECC errors", bars=True))
    if gpu.remap_failed:
        found.append(problem("rows", "ecc_error", "a memory row could not be remapped", bars=True))
    for xid in gpu.xids:
        line = f"Xid (PCI:{gpu.bus}): {xid}"
        known = classify([line])
        kind = "gpu_driver_error" if known is None else known.kind
        # A program's own error (31, 13, ...) ends with the program, which reports it itself.
        bars = kind not in ("illegal_memory_access", "cuda_error")
        found.append(problem(f"Xid {xid}", kind if bars else "node_degraded", line, bars=bars))
    if 0 < limits.nvlink_errors <= gpu.nvlink_errors:
        found.append(problem("NVLink", "nvlink_error", f"{gpu.nvlink_errors} recoveries of NVLinks", bars=False))
    if gpu.throttled:
        found.append(problem("clock", "node_degraded", f"slowed down: {', '.join(gpu.throttled)}", bars=False))
    if gpu.celsius is not None and 0 < limits.gpu_temperature <= gpu.celsius:
        found.append(problem("temperature", "node_degraded", f"{gpu.celsius:.0f} degrees Celsius", bars=False))
    return found
