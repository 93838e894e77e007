"""Environment variables that NCCL and torch's process group need for workers that recover, each with its reason.

The agent sets them, whatever the user has set: with other values survivors of a failure are killed or hang. A user's
contrary value is named in a warning. Sources: torch's ProcessGroupNCCL, NCCL 2.28.9.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Final

REQUIRED: Final[Mapping[str, tuple[str, str]]] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": (
        "0",
        "torch's watchdog would end the survivors of a failure",
    ),
    "TORCH_NCCL_BLOCKING_WAIT": (
        "0",
        "a wait would block in the library until its time-out, out of an abort's reach",
    ),
    "TORCH_NCCL_ENABLE_MONITORING": (
        "0",
        "torch's monitor ends a process minutes after another one has noted an error in the shared store",
    ),
    "TORCH_NCCL_DUMP_ON_TIMEOUT": (
        "0",
        "a watchdog that sees an error would note it in the shared store, for the monitors of joiners to read",
    ),
    "TORCH_NCCL_USE_COMM_NONBLOCKING": (
        "1",
        "groups made lazily, such as Megatron's, could not be aborted while they are being connected",
    ),
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": (
        "60",
        "[s] bounds how long a thread waits for a connection to a dead peer; torch's default is 30 minutes",
    ),
    "NCCL_NVLS_ENABLE": (
        "0",
        "NVLink SHARP's multicast memory is shared by the ranks of a machine and does not survive one rank's abort",
    ),
}
"""Value and reason, by name."""

REFUSED: Final[Mapping[str, tuple[str, str, str]]] = {
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "INFO", "DETAIL turns torch's error handling on again"),
}
"""Refused value, its replacement and the reason, by name."""


def settle(environment: MutableMapping[str, str]) -> list[str]:
    """Set the variables.

    Args:
        environment: environment of the agent, which its workers inherit; changed in place.

    Returns:
        A sentence for each value of the user's that was replaced.
    """
    replaced = []
    for name, (value, reason) in REQUIRED.items():
        given = environment.get(name)
        if given not in (None, value):
            replaced.append(f"{name}={given}: set to {value}, since {reason}")
        environment[name] = value
    for name, (refused, value, reason) in REFUSED.items():
        if environment.get(name, "").upper() == refused:
            replaced.append(f"{name}={environment[name]}: set to {value}, since {reason}")
            environment[name] = value
    return replaced
