"""Builds an epoch's communicator: the one place that knows the back-ends."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from unicron_lightning import wire
from unicron_lightning.worker.communicator import Communicator, SoloCommunicator
from unicron_lightning.worker.connecting import Connect

STORE_TIMEOUT: Final = timedelta(seconds=60)


def open_store(task: str, epoch: wire.Epoch) -> dist.Store:
    """A client of the epoch's store, with a prefix that nobody else can foresee: the store is open to all who reach it.

    A client of its own for each use: a blocked one would hold up the next epoch.
    """
    client = dist.TCPStore(epoch.store.host, epoch.store.port, is_master=False, timeout=STORE_TIMEOUT)
    return dist.PrefixStore(f"unicron/{task}/{epoch.number}/{epoch.key}", client)


def connector(task: str, host: str, device: torch.device) -> Connect:
    """What builds communicators for tensors on ``device`` (and on the CPU).

    Args:
        task: part of the key prefix.
        host: this machine's address for data-plane sockets.
        device: of the gradients.

    Raises:
        ConfigError: workers on this device could not recover.
    """
    if device.type != "cpu":
        from unicron_lightning.worker.nccl import check_device

        check_device(device)

    def connect(epoch: wire.Epoch, rank: int, world: int) -> Communicator:
        if world == 1:
            return SoloCommunicator()
        store = open_store(task, epoch)
        from unicron_lightning.worker.gloo import GlooCommunicator

        cpu = GlooCommunicator(dist.PrefixStore("gloo", store), rank, world, host)
        if device.type != "cuda":
            return cpu
        from unicron_lightning.worker.nccl import NcclCommunicator

        return NcclCommunicator(dist.PrefixStore("nccl", store), rank, world, device, cpu)

    return connect
