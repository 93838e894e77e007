"""Typical error messages of libraries: an example of each kind of error, for faults that raise.

The names are those of `coordinator.severity.errors`. The texts have the form in which torch, CUDA, NCCL and gloo report
such errors, with invented addresses and numbers, so that classification by text sees realistic messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_ASYNCHRONOUS: Final = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
_NCCL: Final = "NCCL error in: ProcessGroupNCCL.cpp:3690, {}, NCCL version 2.27.5\n"


@dataclass(frozen=True, kw_only=True)
class Example:
    """An exception as a library raises it.

    Attributes:
        exception: its class: a built-in one, or one of torch by its path.
        text: its message.
        collective: whether it is raised by a collective, as a failed connection is, and not by a computation.
    """

    exception: str
    text: str
    collective: bool = False


def _cuda(what: str) -> Example:
    return Example(exception="torch.AcceleratorError", text=f"CUDA error: {what}{_ASYNCHRONOUS}")


EXAMPLES: Final[dict[str, Example]] = {
    "connection_failed": Example(
        exception="RuntimeError",
        text="[gloo/transport/tcp/pair.cc:538] Connection closed by peer [10.0.3.17]:42113",
        collective=True,
    ),
    "illegal_memory_access": _cuda("an illegal memory access was encountered"),
    "ecc_error": _cuda("uncorrectable ECC error encountered"),
    "invalid_dma_mapping": Example(
        exception="RuntimeError", text="NVRM: GPU 0000:3b:00.0: Failed to create a DMA mapping!"
    ),
    "nvlink_error": _cuda("uncorrectable NVLink error detected during the execution"),
    "gpu_driver_error": Example(
        exception="RuntimeError", text="CUDA driver initialization failed, you might not have a CUDA gpu."
    ),
    "cuda_error": _cuda("device-side assert triggered"),
    "other_network_error": Example(
        exception="torch.distributed.DistBackendError",
        text=_NCCL.format("unhandled system error (run with NCCL_DEBUG=INFO for details)")
        + "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.\n"
        "Last error:\nCall to ibv_modify_qp failed with 113 No route to host, on dev mlx5_2:1",
        collective=True,
    ),
    "other_software_error": Example(
        exception="RuntimeError", text="mat1 and mat2 shapes cannot be multiplied (32x784 and 512x10)"
    ),
    "nccl_timeout": Example(
        exception="torch.distributed.DistBackendError",
        text="[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1873, OpType=ALLREDUCE, "
        "NumelIn=262144, NumelOut=262144, Timeout(ms)=600000) ran for 600021 milliseconds before timing out.",
        collective=True,
    ),
    "out_of_memory": Example(
        exception="torch.OutOfMemoryError",
        text="CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB of which "
        "1.02 GiB is free. Including non-PyTorch memory, this process has 78.07 GiB memory in use.",
    ),
}
"""Examples by kind of error."""
