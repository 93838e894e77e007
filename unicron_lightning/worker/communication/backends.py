"""Builds an epoch's communicator; the only module that knows the back-ends."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from unicron_lightning import wire
from unicron_lightning.worker.communication.communicator import Communicator, CommunicatorAborted, SoloCommunicator
from unicron_lightning.worker.communication.store_clients import CONNECT_TIMEOUT, clients

if TYPE_CHECKING:
    from unicron_lightning.worker.communication.links.hub import Hub


class DataPlane:
    """Builds the communicators of a process's epochs: `background_connect.Connect`, and what outlives an epoch.

    Args:
        host: this machine's address for data-plane sockets.
        device: of the gradients; communicators are for tensors there and on the CPU.

    Raises:
        ConfigError: workers on this device could not recover.
    """

    def __init__(self, host: str, device: torch.device) -> None:
        if device.type != "cpu":
            from unicron_lightning.worker.communication.nccl import check_device

            check_device(device)
        self._host, self._device = host, device
        self._lock = threading.Lock()
        self._hub: Hub | None = None
        self._closed = False

    @property
    def port(self) -> int:
        """On which other members reach this process."""
        return self._links().port

    def __call__(self, epoch: wire.Epoch, rank: int, world: int) -> Communicator:
        if world == 1:
            return SoloCommunicator()
        if self._device.type != "cuda":
            from unicron_lightning.worker.communication.gloo import CpuCommunicator

            return CpuCommunicator(self._links(), epoch, rank, self._host, CONNECT_TIMEOUT)
        from unicron_lightning.worker.communication.links.communicator import LinkCommunicator
        from unicron_lightning.worker.communication.nccl import NcclCommunicator

        cpu = LinkCommunicator(self._links(), epoch, rank, CONNECT_TIMEOUT)
        try:
            store = dist.PrefixStore("nccl", clients.open(epoch))
        except BaseException:
            cpu.close()
            raise
        return NcclCommunicator(store, rank, world, self._device, cpu)

    def close(self) -> None:
        """Close the links to the other members, after all communicators; idempotent."""
        clients.close()
        with self._lock:
            self._closed = True
            if self._hub is not None:
                self._hub.close()

    def _links(self) -> Hub:
        with self._lock:
            if self._closed:
                raise CommunicatorAborted("closed")
            if self._hub is None:
                from unicron_lightning.worker.communication.links.hub import Hub

                self._hub = Hub(self._host)
            return self._hub
