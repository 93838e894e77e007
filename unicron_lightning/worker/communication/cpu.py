"""The communicator of workers on CPUs: small tensors use the process's links, large ones gloo, which is faster then."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Final

from torch import Tensor

from unicron_lightning import wire
from unicron_lightning.worker.communication.communicator import Handle, gather_bytes
from unicron_lightning.worker.communication.gloo import GlooCommunicator
from unicron_lightning.worker.communication.links.communicator import LinkCommunicator
from unicron_lightning.worker.communication.links.hub import Hub
from unicron_lightning.worker.communication.links.session import LinkHandle

LARGE_BYTES: Final = 1 << 20
"""Least size of a tensor that is sent by gloo."""


class CpuCommunicator:
    """Collectives of one epoch on host memory.

    gloo connects a worker to its neighbours in the ring when the first large tensor is summed.

    Args:
        hub: the links of this process.
        epoch: its members, their hosts and its key.
        rank: this worker's place.
        host: this machine's address for data-plane sockets.
        timeout: for all links together.

    Raises:
        CommunicatorAborted: a peer was not reached, or the epoch was superseded.
    """

    tells_success = True

    def __init__(self, hub: Hub, epoch: wire.Epoch, rank: int, host: str, timeout: timedelta) -> None:
        self.rank = rank
        self.world = len(epoch.members)
        self._links = LinkCommunicator(hub, epoch, rank, timeout)
        self._used_gloo = False
        try:
            self._gloo = GlooCommunicator(
                partial(gather_bytes, self._links), rank, self.world, host, gate=self._links.gate
            )
        except BaseException:
            self._links.close()
            raise

    def all_reduce(self, tensor: Tensor) -> Handle:
        return self._by_size(tensor).all_reduce(tensor)

    def all_gather(self, received: Tensor, sent: Tensor) -> Handle:
        return self._links.all_gather(received, sent)

    def broadcast(self, tensor: Tensor, root: int) -> Handle:
        return self._by_size(tensor).broadcast(tensor, root)

    def wait(self, handle: Handle) -> None:
        (self._links if isinstance(handle, LinkHandle) else self._gloo).wait(handle)

    def abort(self, reason: str) -> None:
        self._links.abort(reason)
        self._gloo.abort(reason)

    def close(self) -> None:
        self._links.close()
        self._gloo.close()

    def released(self, seconds: float) -> bool:
        return not self._used_gloo  # gloo may write to the tensors of an aborted collective until its own time-out

    def _by_size(self, tensor: Tensor) -> LinkCommunicator | GlooCommunicator:
        if tensor.numel() * tensor.element_size() < LARGE_BYTES:
            return self._links
        self._used_gloo = True
        return self._gloo
