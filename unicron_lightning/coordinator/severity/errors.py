"""Kinds of errors and their severities: the paper's table of in-band detection, with additions."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Final, Literal

from unicron_lightning import wire

Severity = Literal["SEV1", "SEV2", "SEV3"]


@dataclass(frozen=True, kw_only=True)
class ErrorKind:
    """A row of the table.

    Attributes:
        name: name in reports of errors of this kind.
        method: detection method in the paper's terms; "" for kinds that are not in the paper.
        severity: severity of the first occurrence.
        seen: evidence by which it is detected today; "" if nothing reports it yet.
    """

    name: str
    method: str
    severity: Severity
    seen: str = ""


_HEALTH = "node health monitoring"
_PROCESS = "process supervision"
_EXCEPTION = "exception propagation"
_STATISTICS = "online statistical monitoring"

KINDS: Final = (
    ErrorKind(
        name="lost_connection",
        method=_HEALTH,
        severity="SEV1",
        seen="the agent's connection ends, or is silent for too long, and the agent does not reconnect",
    ),
    ErrorKind(
        name="exited_abnormally",
        method=_PROCESS,
        severity="SEV2",
        seen="exit status or signal of a worker; a message of a loader",
    ),
    ErrorKind(
        name="connection_failed",
        method=_EXCEPTION,
        severity="SEV3",
        seen="`CommError` that no death explains; a message of NCCL, gloo, a store or a socket",
    ),
    ErrorKind(name="illegal_memory_access", method=_EXCEPTION, severity="SEV2", seen="a message of CUDA"),
    ErrorKind(name="ecc_error", method=_EXCEPTION, severity="SEV1", seen="a message of CUDA; NVML: counters, Xid"),
    ErrorKind(name="invalid_dma_mapping", method=_EXCEPTION, severity="SEV1", seen="a message of CUDA or NCCL"),
    ErrorKind(name="nvlink_error", method=_EXCEPTION, severity="SEV1", seen="a message of CUDA; NVML: counters, Xid"),
    ErrorKind(name="gpu_driver_error", method=_EXCEPTION, severity="SEV1", seen="a message of CUDA or NVML; Xid"),
    ErrorKind(name="cuda_error", method=_EXCEPTION, severity="SEV2", seen="a message of CUDA, cuBLAS, cuDNN or NCCL"),
    ErrorKind(
        name="other_network_error",
        method=_EXCEPTION,
        severity="SEV3",
        seen="a message of NCCL, gloo, a store or a socket",
    ),
    ErrorKind(name="other_software_error", method=_EXCEPTION, severity="SEV2", seen="any other exception"),
    ErrorKind(
        name="nccl_timeout",
        method=_STATISTICS,
        severity="SEV3",
        seen="a message of NCCL; all members wait in a collective",
    ),
    ErrorKind(
        name="link_flapping",
        method=_STATISTICS,
        severity="SEV3",
        seen="an agent's connection breaks and is renewed repeatedly",
    ),
    ErrorKind(name="task_hang", method=_STATISTICS, severity="SEV2", seen="a worker is overdue and in no collective"),
    ErrorKind(name="config_error", method="", severity="SEV2", seen="a `ConfigError` of this package"),
    ErrorKind(name="unnamed_software_error", method=_STATISTICS, severity="SEV2"),
    ErrorKind(
        name="out_of_memory",
        method="",
        severity="SEV2",
        seen="a message of CUDA, torch, numpy or Python; the OOM killer",
    ),
    ErrorKind(name="storage_error", method="", severity="SEV2", seen="a message of torch or the system"),
    ErrorKind(name="nan_loss", method="", severity="SEV3", seen="the loss of a step, as it is committed; a message"),
    ErrorKind(
        name="parameters_differ",
        method="",
        severity="SEV3",
        seen='the digests in a commit, with `on_divergence="stop"`',
    ),
    ErrorKind(name="programs_differ", method="", severity="SEV3", seen="a `ProgramsDiffer` of this package"),
    ErrorKind(
        name="node_degraded",
        method="",
        severity="SEV3",
        seen="disk or memory nearly full; a GPU that is hot or slowed down",
    ),
    ErrorKind(
        name="link_degraded",
        method="",
        severity="SEV3",
        seen="a message that `health.patterns` maps to it; the simulator's slow links",
    ),
    ErrorKind(name="silent", method="", severity="SEV2", seen="no heartbeat of a worker for `worker_timeout`"),
    ErrorKind(name="recovery_stuck", method="", severity="SEV2", seen="no report for an epoch, or no entry, in time"),
    ErrorKind(name="keeps_failing", method="", severity="SEV2", seen="repeated SEV3 without a finished step"),
)

SEVERITY: Final[dict[str, Severity]] = {kind.name: kind.severity for kind in KINDS}
"""Severity by name of the kind."""

REPORTED_ONLY: Final = ("link_flapping", "link_degraded", "nan_loss", "node_degraded")
"""Kinds that end nothing: they are only logged."""

STOPPING: Final = ("parameters_differ", "programs_differ")
"""Kinds that end the task, whatever its state is."""


def known(kind: str) -> str:
    """Return the kind to handle when ``kind`` is reported, maybe by a newer agent."""
    return kind if kind in SEVERITY else "unnamed_software_error"


def was_sent(message: wire.WorkerDied) -> bool:
    """Whether a worker ended by a signal that no fault of a process itself raises, and that nothing explains."""
    return message.cause == "signal" and message.code in (signal.SIGKILL, signal.SIGTERM) and message.kind is None
