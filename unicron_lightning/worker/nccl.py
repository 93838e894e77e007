"""NCCL behind the communicator seam, with gloo for what lives on the CPU.

Written from NCCL's and torch's sources; see docs/protocol.md for what has been proven on hardware. A rank's wait polls
the work instead of blocking in it, and abort is called from the control thread, which NCCL allows while another thread
has collectives in flight. The agent sets ``TORCH_NCCL_ASYNC_ERROR_HANDLING=0``: with torchelastic's default, NCCL's
watchdog would end the survivors.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from unicron_lightning.worker.communicator import CommunicatorAborted, Handle
from unicron_lightning.worker.gloo import OPERATION_TIMEOUT, GlooCommunicator

POLL_SECONDS: Final = 0.0002


class NcclCommunicator:
    """Collectives of one epoch: CUDA tensors over NCCL, CPU tensors over ``cpu``.

    Args:
        store: prefix fresh to this epoch.
        rank, world: place and number of members.
        device: this rank's accelerator.
        cpu: communicator of the same members.
    """

    def __init__(self, store: dist.Store, rank: int, world: int, device: torch.device, cpu: GlooCommunicator) -> None:
        self.rank = rank
        self.world = world
        self._cpu = cpu
        self._reason: str | None = None
        self._handles: list[Handle] = []
        options = dist.ProcessGroupNCCL.Options()
        options.config.blocking = 0  # so that abort also ends a communicator that is still being set up
        options._timeout = timedelta(seconds=OPERATION_TIMEOUT.total_seconds())
        self._group: dist.ProcessGroupNCCL | None = dist.ProcessGroupNCCL(store, rank, world, options)
        with torch.cuda.device(device):
            self._group.eager_connect_single_device(device)

    def all_reduce(self, tensor: Tensor) -> Handle:
        if tensor.device.type != "cuda":
            return self._cpu.all_reduce(tensor)
        return self._track(self._live().allreduce([tensor]))  # type: ignore[attr-defined]

    def all_gather(self, received: Tensor, sent: Tensor) -> Handle:
        return self._cpu.all_gather(received, sent)

    def broadcast(self, tensor: Tensor, root: int) -> Handle:
        if tensor.device.type != "cuda":
            return self._cpu.broadcast(tensor, root)
        return self._track(self._live().broadcast(tensor, root))  # type: ignore[attr-defined]

    def wait(self, handle: Handle) -> None:
        if handle.watched:
            self._cpu.wait(handle)
            return
        work = handle.work
        assert work is not None
        while not work.is_completed():
            if self._reason is not None:
                raise CommunicatorAborted(self._reason)
            time.sleep(POLL_SECONDS)
        if self._reason is not None and not handle.succeeded():
            raise CommunicatorAborted(self._reason)
        try:
            work.wait()
        except RuntimeError as error:
            self.abort(str(error).splitlines()[0][:200])
            raise CommunicatorAborted(str(error)) from None
        handle.done = True

    def abort(self, reason: str) -> None:
        if self._reason is not None:
            return
        for handle in list(self._handles):
            handle.sample()  # an aborted kernel's end looks like completion
        self._reason = reason
        self._cpu.abort(reason)
        group = self._group
        if group is not None:
            group.abort()

    def close(self) -> None:
        self.abort("closed")
        self._cpu.close()
        self._group = None

    def _track(self, work: dist.Work) -> Handle:
        handle = Handle(work)
        self._handles = [h for h in self._handles if not h.done]
        self._handles.append(handle)
        return handle

    def _live(self) -> dist.ProcessGroupNCCL:
        if self._reason is not None or self._group is None:
            raise CommunicatorAborted(self._reason or "closed")
        return self._group
