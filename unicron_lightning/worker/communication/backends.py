"""Builds an epoch's communicator; the only module that knows the back-ends."""

from __future__ import annotations

import hmac
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from unicron_lightning import wire
from unicron_lightning.worker.communication.background_connect import Connect
from unicron_lightning.worker.communication.communicator import Communicator, SoloCommunicator

STORE_TIMEOUT: Final = timedelta(seconds=60)


def name_key(epoch_key: str) -> str:
    """Derive the unpredictable part of names in the store, which does not reveal the epoch's key."""
    return hmac.digest(epoch_key.encode(), b"names", "sha256").hex()[:32]


def open_store(task: str, epoch: wire.Epoch) -> dist.Store:
    """Open a client of the epoch's store, with an unpredictable prefix, since any host that reaches the store can use
    it.

    Each use needs its own client: a blocked one would delay the next epoch.
    """
    client = dist.TCPStore(epoch.store.host, epoch.store.port, is_master=False, timeout=STORE_TIMEOUT)
    return dist.PrefixStore(f"unicron/{task}/{epoch.number}/{name_key(epoch.key)}", client)


def connector(task: str, host: str, device: torch.device) -> Connect:
    """Return a function that builds communicators for tensors on ``device`` (and on the CPU).

    Args:
        task: part of the key prefix.
        host: this machine's address for data-plane sockets.
        device: of the gradients.

    Raises:
        ConfigError: workers on this device could not recover.
    """
    if device.type != "cpu":
        from unicron_lightning.worker.communication.nccl import check_device

        check_device(device)

    def connect(epoch: wire.Epoch, rank: int, world: int) -> Communicator:
        if world == 1:
            return SoloCommunicator()
        store = open_store(task, epoch)
        from unicron_lightning.worker.communication.gloo import GlooCommunicator

        cpu = GlooCommunicator(dist.PrefixStore("gloo", store), rank, world, host)
        if device.type != "cuda":
            return cpu
        from unicron_lightning.worker.communication.nccl import NcclCommunicator

        return NcclCommunicator(dist.PrefixStore("nccl", store), rank, world, device, cpu)

    return connect
