"""Kinds of errors and their severities: the paper's table of in-band detection, with additions."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Final, Literal

from unicron_lightning import wire

Severity = Literal["SEV1", "SEV2", "SEV3"]


SEVERITY: Final[Mapping[str, Severity]] = {
    "lost_connection": "SEV1",
    "exited_abnormally": "SEV2",
    "connection_failed": "SEV3",
    "illegal_memory_access": "SEV2",
    "ecc_error": "SEV1",
    "invalid_dma_mapping": "SEV1",
    "nvlink_error": "SEV1",
    "gpu_driver_error": "SEV1",
    "cuda_error": "SEV2",
    "other_network_error": "SEV3",
    "other_software_error": "SEV2",
    "nccl_timeout": "SEV3",
    "link_flapping": "SEV3",
    "task_hang": "SEV2",
    "config_error": "SEV2",
    "unnamed_software_error": "SEV2",
    "out_of_memory": "SEV2",
    "storage_error": "SEV2",
    "nan_loss": "SEV3",
    "parameters_differ": "SEV3",
    "programs_differ": "SEV3",
    "node_degraded": "SEV3",
    "link_degraded": "SEV3",
    "silent": "SEV2",
    "recovery_stuck": "SEV2",
    "keeps_failing": "SEV2",
}
"""Severity of the first occurrence of an error, by its kind. docs/detection.md has the evidence for each kind."""

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
