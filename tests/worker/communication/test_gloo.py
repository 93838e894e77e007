"""The gloo communicator: collectives, aborts that release at once, nothing left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from unicron_lightning.worker.communication.communicator import (
    CommunicatorAborted,
    EpochCollectives,
    SoloCommunicator,
    broadcast_bytes,
    gather_bytes,
    gather_rows,
)
from unicron_lightning.worker.communication.gloo import GlooCommunicator, wait_buried


@pytest.fixture(scope="module")
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def client(server: dist.TCPStore, prefix: str) -> dist.Store:
    return dist.PrefixStore(prefix, dist.TCPStore("127.0.0.1", server.port, is_master=False))


def in_threads(server: dist.TCPStore, world: int, body: Callable[[EpochCollectives], Any]) -> list[Any]:
    """Run ``body`` on each rank of a new group; ranks share the process."""
    results: list[Any] = [None] * world
    prefix = uuid.uuid4().hex

    def run(rank: int) -> None:
        try:
            communicator = GlooCommunicator(client(server, prefix), rank, world, "127.0.0.1")
            try:
                results[rank] = body(communicator)
            finally:
                done.wait(20)
                communicator.close()
        except Exception as error:  # noqa: BLE001 - reported by the main thread
            results[rank] = error
            done.abort()

    done = threading.Barrier(world)
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for result in results:
        if isinstance(result, Exception):
            raise result
    assert wait_buried(5)
    return results


@pytest.mark.parametrize("world", [2, 3])
def test_collectives(server: dist.TCPStore, world: int) -> None:
    def body(communicator: EpochCollectives) -> Any:
        summed = torch.full((5,), float(communicator.rank + 1))
        copied = torch.full((2, 2), communicator.rank, dtype=torch.int64)
        first, second = communicator.all_reduce(summed), communicator.broadcast(copied, 1)
        communicator.wait(second)
        communicator.wait(first)
        assert first.succeeded() and second.succeeded()
        return summed.tolist(), copied.tolist()

    total = float(sum(range(1, world + 1)))
    assert in_threads(server, world, body) == [([total] * 5, [[1, 1], [1, 1]])] * world


@pytest.mark.parametrize("world", [1, 2, 3])
def test_rows(server: dist.TCPStore, world: int) -> None:
    def body(communicator: EpochCollectives) -> Any:
        return gather_rows(communicator, [communicator.rank, 0.5]).tolist()

    rows = [[float(rank), 0.5] for rank in range(world)]
    assert in_threads(server, world, body) == [rows] * world
    assert gather_rows(SoloCommunicator(), [3.0, 4.0]).tolist() == [[3.0, 4.0]]


def test_bytes(server: dist.TCPStore) -> None:
    def body(communicator: EpochCollectives) -> Any:
        parts = gather_bytes(communicator, bytes(range(100)) * communicator.rank)
        empty = gather_bytes(communicator, b"")
        sent = broadcast_bytes(communicator, b"hello" if communicator.rank == 2 else None, 2)
        nothing = broadcast_bytes(communicator, b"" if communicator.rank == 0 else None, 0)
        return parts, empty, sent, nothing

    expected = ([b"", bytes(range(100)), bytes(range(100)) * 2], [b""] * 3, b"hello", b"")
    assert in_threads(server, 3, body) == [expected] * 3


def test_a_world_of_one() -> None:
    solo = SoloCommunicator()
    assert gather_bytes(solo, b"x") == [b"x"] and broadcast_bytes(solo, b"y", 0) == b"y"
    solo.abort("over")
    with pytest.raises(CommunicatorAborted, match="over"):
        solo.all_reduce(torch.ones(1))


def test_an_abort_releases_a_wait(server: dist.TCPStore) -> None:
    """Rank 1 never takes part; rank 0 waits and is released by another thread."""

    def body(communicator: EpochCollectives) -> Any:
        if communicator.rank == 1:
            return None
        handle = communicator.all_reduce(torch.ones(1000))
        at = []
        timer = threading.Timer(0.1, lambda: (at.append(time.monotonic()), communicator.abort("epoch 2")))
        timer.start()
        with pytest.raises(CommunicatorAborted, match="epoch 2"):
            communicator.wait(handle)
        released = time.monotonic() - at[0]
        timer.join()
        assert not handle.succeeded()
        with pytest.raises(CommunicatorAborted, match="epoch 2"):
            communicator.all_reduce(torch.ones(1))
        communicator.abort("again")
        return released

    assert in_threads(server, 2, body)[0] < 5


def test_what_fails_by_an_abort_says_why(server: dist.TCPStore) -> None:
    """The collective has failed with gloo's own message before any thread waits for it."""

    def body(communicator: EpochCollectives) -> None:
        if communicator.rank == 0:
            handle = communicator.all_reduce(torch.ones(1000))
            communicator.abort("epoch 2")
            deadline = time.monotonic() + 20
            while not handle.done and time.monotonic() < deadline:
                time.sleep(0.01)
            assert handle.done
            with pytest.raises(CommunicatorAborted, match="epoch 2"):
                communicator.wait(handle)

    in_threads(server, 2, body)


def test_nothing_is_left_after_many_groups(server: dist.TCPStore) -> None:
    def resources() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def half_done(communicator: EpochCollectives) -> None:
        communicator.wait(communicator.all_reduce(torch.ones(10)))
        if communicator.rank == 0:
            communicator.all_reduce(torch.ones(10))

    in_threads(server, 2, half_done)
    before = resources()
    for _ in range(10):
        in_threads(server, 2, half_done)
    deadline = time.monotonic() + 5
    while resources() > before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert resources() <= before


PEER = """
import sys, time, torch, torch.distributed as dist
from unicron_lightning.worker.communication.gloo import GlooCommunicator
store = dist.PrefixStore("peer", dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False))
communicator = GlooCommunicator(store, 1, 2, "127.0.0.1")
communicator.wait(communicator.all_reduce(torch.ones(1)))
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_a_peer_that_dies_or_stops(number: signal.Signals, tmp_path: Path) -> None:
    """A dead peer's collective fails by itself or by abort; a stopped one's by abort only. Either way at once."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    peer = subprocess.Popen([sys.executable, "-c", PEER, str(server.port)], stdout=subprocess.PIPE)
    try:
        communicator = GlooCommunicator(client(server, "peer"), 0, 2, "127.0.0.1")
        communicator.wait(communicator.all_reduce(torch.ones(1)))
        assert peer.stdout is not None and peer.stdout.readline() == b"ready\n"
        handle = communicator.all_reduce(torch.ones(1 << 20))
        peer.send_signal(number)
        timer = threading.Timer(0.2, lambda: communicator.abort("epoch 2"))
        timer.start()
        start = time.monotonic()
        with pytest.raises(CommunicatorAborted):
            communicator.wait(handle)
        assert time.monotonic() - start < 10, "without the abort a stopped peer is waited for"
        timer.join()
        communicator.close()
        assert wait_buried(5)
    finally:
        peer.kill()
        peer.wait(10)
        assert peer.stdout is not None
        peer.stdout.close()
