"""The client of an epoch's store is opened before the epoch."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import psutil
import pytest
import torch.distributed as dist

from unicron_lightning import wire
from unicron_lightning.worker.communication.owned_group import wait_destroyed
from unicron_lightning.worker.communication.store_clients import StoreClients


@pytest.fixture
def clients() -> Iterator[StoreClients]:
    found = StoreClients()
    yield found
    found.close()
    assert wait_destroyed(20)


def epoch_of(number: int, port: int) -> wire.Epoch:
    return wire.Epoch(
        number=number,
        kind="fail",
        members=[],
        store=wire.Address(host="127.0.0.1", port=port),
        hold=False,
        incident=None,
        published_at=0.0,
        key="5f" * 16,
    )


def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def local_ports(port: int) -> set[int]:
    """Ports of this process's connections to a store."""
    connections = psutil.Process(os.getpid()).net_connections("tcp")
    return {each.laddr.port for each in connections if each.raddr and each.raddr.port == port}


def wait_spare(clients: StoreClients) -> None:
    deadline = time.monotonic() + 20
    while clients._spare is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert clients._spare is not None


def test_the_next_epoch_finds_its_client_open(clients: StoreClients) -> None:
    """A connection for each epoch's use, the second of which exists before its epoch, and names that differ."""
    store = server()
    before = local_ports(store.port)
    first = clients.open(epoch_of(1, store.port))
    first.set("a", "1")
    wait_spare(clients)
    both = local_ports(store.port) - before
    assert len(both) == 2
    second = clients.open(epoch_of(2, store.port))
    assert local_ports(store.port) - before >= both
    second.set("a", "2")
    assert first.get("a") == b"1" and second.get("a") == b"2"


def test_another_store_or_a_dead_one_gets_a_new_client(clients: StoreClients) -> None:
    store, other = server(), server()
    clients.open(epoch_of(1, store.port))
    wait_spare(clients)
    clients.open(epoch_of(2, other.port)).set("a", "1")
    wait_spare(clients)
    assert clients._spare is not None and clients._spare[0].port == other.port
    del other
    third = clients.open(epoch_of(3, store.port))
    third.set("b", "2")
    assert third.get("b") == b"2"
