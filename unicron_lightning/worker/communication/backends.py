"""Builds an epoch's communicator; the only module that knows the back-ends."""

from __future__ import annotations

import hmac
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist

from unicron_lightning import wire
from unicron_lightning.worker.communication.communicator import Communicator, CommunicatorAborted, SoloCommunicator

if TYPE_CHECKING:
    from unicron_lightning.worker.communication.links.hub import Hub

CONNECT_TIMEOUT: Final = timedelta(seconds=60)
"""For all connections of an epoch together."""


def name_key(epoch_key: str) -> str:
    """Derive the unpredictable part of names in the store, which does not reveal the epoch's key."""
    return hmac.digest(epoch_key.encode(), b"names", "sha256").hex()[:32]


def open_store(epoch: wire.Epoch) -> dist.Store:
    """Open a client of the epoch's store, with an unpredictable prefix, since any host that reaches the store can use
    it.

    Each use needs its own client: a blocked one would delay the next epoch.
    """
    client = dist.TCPStore(epoch.store.host, epoch.store.port, is_master=False, timeout=CONNECT_TIMEOUT)
    return dist.PrefixStore(f"unicron/{epoch.number}/{name_key(epoch.key)}", client)


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
            from unicron_lightning.worker.communication.cpu import CpuCommunicator

            return CpuCommunicator(self._links(), epoch, rank, self._host, CONNECT_TIMEOUT)
        from unicron_lightning.worker.communication.links.communicator import LinkCommunicator
        from unicron_lightning.worker.communication.nccl import NcclCommunicator

        cpu = LinkCommunicator(self._links(), epoch, rank, CONNECT_TIMEOUT)
        try:
            store = dist.PrefixStore("nccl", open_store(epoch))
        except BaseException:
            cpu.close()
            raise
        return NcclCommunicator(store, rank, world, self._device, cpu)

    def close(self) -> None:
        """Close the links to the other members, after all communicators; idempotent."""
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
