"""The barrier before aborts, between processes: announcements, deaths, a rank that stands still."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import torch.distributed as dist

from unicron_lightning.worker.communication.abort_barrier import AbortBarrier

PEER = """
import os, sys, time
import torch.distributed as dist
from unicron_lightning.worker.communication.abort_barrier import AbortBarrier
port, fork = int(sys.argv[1]), sys.argv[2] == "fork"
barrier = AbortBarrier(dist.TCPStore("127.0.0.1", port, is_master=False), 1, 3)
if fork and os.fork() == 0:
    time.sleep(60)
print("ready", flush=True)
sys.stdin.readline()
print(barrier.meet(), flush=True)
sys.stdin.readline()
started = time.monotonic()
print(barrier.wait(5.0), time.monotonic() - started, flush=True)
sys.stdin.readline()
"""


class Peer:
    """Rank 1 of three, as a process; the test's process is rank 0, and rank 2 is on another host."""

    def __init__(self, fork: str = "") -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        command = [sys.executable, "-c", PEER, str(self.store.port), fork]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.read() == "ready"
        self.barrier = AbortBarrier(self.store, 0, 3)
        assert self.barrier.meet() == 1
        assert self.order() == "1"

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def order(self) -> str:
        self.go()
        return self.read()

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def close(self) -> None:
        for process in [*psutil.Process(self.process.pid).children(), self.process]:
            process.kill()
        self.process.communicate()
        del self.store


@pytest.fixture
def peer(request: pytest.FixtureRequest) -> Iterator[Peer]:
    made = Peer(getattr(request, "param", ""))
    yield made
    made.close()


def _timed(barrier: AbortBarrier, seconds: float) -> tuple[bool, float]:
    started = time.monotonic()
    return barrier.wait(seconds), time.monotonic() - started


@pytest.mark.parametrize("peer", ["", "fork"], indirect=True)
def test_both_announce(peer: Peer) -> None:
    """Also with a child that holds the peer's socket."""
    peer.go()
    time.sleep(0.3)
    met, seconds = _timed(peer.barrier, 20.0)
    assert met and seconds < 5.0
    answer: list[Any] = peer.read().split()
    assert answer[0] == "True" and 0.2 < float(answer[1]) < 5.0, "the peer waited for this rank"
    assert peer.barrier.wait(), "later aborts do not wait again"


def test_a_dead_rank_is_not_waited_for(peer: Peer) -> None:
    os.kill(peer.process.pid, signal.SIGKILL)
    met, seconds = _timed(peer.barrier, 20.0)
    assert met and seconds < 5.0


def test_a_rank_that_stands_still_is_waited_for_only_so_long(peer: Peer) -> None:
    os.kill(peer.process.pid, signal.SIGSTOP)
    met, seconds = _timed(peer.barrier, 0.5)
    assert not met and 0.4 < seconds < 5.0


def test_connections_are_released_without_a_wait_for_another_threads(peer: Peer) -> None:
    """The caller may hold the control thread's lock."""
    waiting = threading.Thread(target=peer.barrier.wait, args=(5.0,))
    waiting.start()
    time.sleep(0.2)
    released, seconds = _timed(peer.barrier, 0.0)
    assert not released and seconds < 1.0
    peer.process.kill()
    waiting.join(20)


def test_a_rank_that_aborts_before_it_has_met_waits_for_none() -> None:
    store = dist.HashStore()
    first, second = AbortBarrier(store, 0, 2), AbortBarrier(store, 1, 2)
    first.announce()
    assert second.meet() == 0
    assert first.wait(20.0) and second.wait(20.0)


def test_nothing_is_left() -> None:
    before = psutil.Process().num_fds()
    store = dist.HashStore()
    barriers = [AbortBarrier(store, rank, 3) for rank in range(3)]
    assert [barrier.meet() for barrier in barriers] == [2, 2, 2]
    for barrier in barriers:
        barrier.announce()
    assert all(barrier.wait() for barrier in barriers)
    assert psutil.Process().num_fds() == before
