"""Links between real sockets: epochs that keep them, aborts, strangers, peers that die."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from unicron_lightning import wire
from unicron_lightning.worker.communication.communicator import (
    Communicator,
    CommunicatorAborted,
    Route,
    broadcast_bytes,
    gather_bytes,
    gather_rows,
)
from unicron_lightning.worker.communication.gloo import LARGE_BYTES, CpuCommunicator, wait_buried
from unicron_lightning.worker.communication.links import hub as hubs
from unicron_lightning.worker.communication.links.communicator import LinkCommunicator
from unicron_lightning.worker.communication.links.greeting import HELLO_BYTES, REPLY_BYTES, Hello, confirm
from unicron_lightning.worker.communication.links.hub import Hub
from unicron_lightning.worker.communication.links.link import GOODBYE, RESUME, Header

KEY = "5f" * 16


class Members:
    """Workers, each with a hub of its own in this process.

    Args:
        names: one letter each.
        elsewhere: ports of further ones, in other processes.
    """

    def __init__(self, names: str, elsewhere: dict[str, int] | None = None) -> None:
        self.hubs = {name: Hub("127.0.0.1") for name in names}
        self.ports = {**{name: hub.port for name, hub in self.hubs.items()}, **(elsewhere or {})}
        self.number = 0

    def epoch(self, names: str, key: str = KEY) -> wire.Epoch:
        """The next epoch of these workers."""
        self.number += 1
        members = [
            wire.Member(worker=n, agent=n, node=n, host="127.0.0.1", local_rank=0, port=self.ports[n]) for n in names
        ]
        return wire.Epoch(
            number=self.number,
            kind="fail",
            members=members,
            store=wire.Address(host="", port=0),
            hold=False,
            incident=None,
            published_at=0.0,
            key=key,
        )

    def join(self, epoch: wire.Epoch, rank: int, seconds: float = 20) -> LinkCommunicator:
        """Build a member's communicator."""
        name = epoch.members[rank].worker
        return LinkCommunicator(self.hubs[name], epoch, rank, timedelta(seconds=seconds))

    def run(self, names: str, body: Callable[[LinkCommunicator], Any], *, close: bool = True) -> list[Any]:
        """Run ``body`` on each member of a new epoch, each in a thread; return the results by rank."""
        epoch = self.epoch(names)
        results: list[Any] = [None] * len(names)

        def member(rank: int) -> None:
            try:
                communicator = self.join(epoch, rank)
                results[rank] = body(communicator)
                done.wait(20)
                if close:
                    communicator.close()
            except Exception as error:  # noqa: BLE001 - raised by the main thread
                results[rank] = error
                done.abort()

        done = threading.Barrier(len(names))
        in_parallel([lambda rank=rank: member(rank) for rank in range(len(names))])
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    def links(self, name: str) -> dict[str, int]:
        """The descriptors of a member's links by worker."""
        with self.hubs[name].lock:
            return {link.worker: link.sock.fileno() for link in self.hubs[name]._links.values()}

    def close(self) -> None:
        for hub in self.hubs.values():
            hub.close()


def in_parallel(bodies: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=body) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


@pytest.fixture
def members() -> Iterator[Members]:
    found = Members("abcde")
    yield found
    found.close()


def everything(communicator: Communicator) -> Any:
    """All collectives, several at once."""
    rank = communicator.rank
    large = torch.arange(100_000, dtype=torch.float64) * (rank + 1)
    small, copied = torch.full((3,), float(rank + 1)), torch.full((2, 2), rank)
    handles = [communicator.all_reduce(large), communicator.all_reduce(small), communicator.broadcast(copied, 1)]
    for handle in reversed(handles):
        communicator.wait(handle)
        assert handle.succeeded()
    rows = gather_rows(communicator, [rank, 0.5]).tolist()
    parts = gather_bytes(communicator, bytes(range(100)) * rank)
    even = gather_bytes(communicator, bytes([rank]) * (10 + rank % 2))
    assert even == [bytes([each]) * (10 + each % 2) for each in range(communicator.world)]
    word = broadcast_bytes(communicator, b"hello" if rank == 0 else None, 0)
    return large[-1].item(), small.tolist(), copied.tolist(), rows, parts, word


@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_collectives_in_epoch_after_epoch(members: Members, world: int) -> None:
    names = "abcde"[:world]
    total = world * (world + 1) / 2
    expected = (
        99_999 * total,
        [total] * 3,
        [[1, 1], [1, 1]],
        [[float(rank), 0.5] for rank in range(world)],
        [bytes(range(100)) * rank for rank in range(world)],
        b"hello",
    )
    assert members.run(names, everything) == [expected] * world
    before = {name: members.links(name) for name in names}
    assert members.run(names[::-1], everything) == [expected] * world
    after = {name: members.links(name) for name in names}
    # Who is behind whom has changed, the pairs have not, but with five.
    assert all(after[name][peer] == before[name][peer] for name in names for peer in before[name])


def test_tensors_of_inference_mode(members: Members) -> None:
    """Evaluations sum tensors that may be changed in inference mode only, which is a thread's own."""

    def body(communicator: LinkCommunicator) -> Any:
        with torch.inference_mode():
            small, large, copied = torch.ones(3), torch.ones(100_000), torch.full((2,), communicator.rank)
            for handle in (
                communicator.all_reduce(small),
                communicator.all_reduce(large),
                communicator.broadcast(copied, 1),
            ):
                communicator.wait(handle)
            return small.tolist(), large[-1].item(), copied.tolist(), gather_rows(communicator, [1.0]).tolist()

    assert members.run("abc", body) == [([3.0] * 3, 3.0, [1, 1], [[1.0]] * 3)] * 3


def test_survivors_keep_their_links(members: Members) -> None:
    members.run("abcde", everything)
    before = members.links("a")
    members.hubs.pop("c").close()
    members.run("abde", everything)
    after = members.links("a")
    assert set(after) == {"b", "d", "e"} and all(after[name] == before[name] for name in set(after) & set(before))


def test_an_abort_releases_a_wait_and_the_tensor(members: Members) -> None:
    """Rank 1 takes no part; rank 0 has sent, and waits. Afterwards the links serve the next epoch."""
    kept = torch.ones(1000)

    def body(communicator: LinkCommunicator) -> Any:
        if communicator.rank == 1:
            return None
        handle = communicator.all_reduce(kept)
        timer = threading.Timer(0.1, lambda: communicator.abort("epoch 2"))
        timer.start()
        with pytest.raises(CommunicatorAborted, match="epoch 2"):
            communicator.wait(handle)
        timer.join()
        assert not handle.succeeded() and communicator.released(0)
        with pytest.raises(CommunicatorAborted, match="epoch 2"):
            communicator.all_reduce(torch.ones(1))
        return None

    members.run("ab", body)
    before = members.links("a")
    members.run("ab", everything)
    assert members.links("a") == before and kept.eq(1).all()


def test_a_frame_cut_short_ends_its_link_alone(members: Members) -> None:
    """Rank 0 has sent a part of a large tensor when it leaves the epoch: no rank may take the rest for data."""
    got = torch.zeros(1 << 24)

    def body(communicator: LinkCommunicator) -> Any:
        if communicator.rank == 0:
            communicator.broadcast(torch.ones(1 << 24), 0)  # far more than the connection takes
            communicator.abort("over")
        return None

    members.run("ab", body, close=False)
    assert "b" not in members.links("a")
    del got
    members.run("ab", everything)


def test_ranks_in_different_collectives_are_told(members: Members) -> None:
    def body(communicator: LinkCommunicator) -> Any:
        def differing() -> None:
            communicator.wait(communicator.all_reduce(torch.ones(4 if communicator.rank else 3)))

        with pytest.raises(CommunicatorAborted, match="different paths"):
            differing()

    members.run("ab", everything)
    before = members.links("a")
    members.run("ab", body)
    members.run("ab", everything)
    assert members.links("a") == before, "the frames after the refused one are read as such"


def test_a_member_that_has_finished_disturbs_none(members: Members) -> None:
    """Goodbye comes after the last bytes; what ends then is no failure for collectives that are complete elsewhere."""

    def body(communicator: LinkCommunicator) -> Any:
        gather_rows(communicator, [1.0])
        if communicator.rank == 0:
            members.hubs["a"].close()
            return True
        while members.links("b"):
            time.sleep(0.01)

        without = not communicator.broken()
        with pytest.raises(CommunicatorAborted, match="worker a has left"):
            communicator.all_reduce(torch.ones(1))
        return without

    assert members.run("ab", body, close=False) == [True, True]


def test_strangers_get_nowhere(members: Members) -> None:
    """No proof, a wrong key, an old epoch, a wrong rank, nonsense: closed, and the members meet all the same."""
    port = members.hubs["a"].port
    nonsense = socket.create_connection(("127.0.0.1", port))
    nonsense.sendall(b"GET / HTTP/1.1\r\n\r\n".ljust(HELLO_BYTES, b"x"))
    early = socket.create_connection(("127.0.0.1", port))
    early.sendall(Hello.new(1, 1, 0).packed())  # before the epoch, which it knows the number of
    assert members.run("ab", everything, close=False)
    epoch = members.epoch("ab", key="another")
    answer = early.recv(REPLY_BYTES)
    assert len(answer) == REPLY_BYTES and confirm(epoch, Hello.new(1, 1, 0), answer, port) is None
    early.sendall(b"x" * 32)
    for hello in (Hello.new(0, 1, 0), Hello.new(1, 1, 1), Hello.new(1, 5, 0)):
        other = socket.create_connection(("127.0.0.1", port))
        other.sendall(hello.packed())
        assert other.recv(1) == b"", hello
        other.close()
    for sock in (nonsense, early):
        sock.settimeout(10)
        assert sock.recv(1) == b""
        sock.close()
    assert members.links("a").keys() == {"b"}


def test_a_dialler_without_the_key_is_refused_by_both(members: Members) -> None:
    """Two processes with different keys never connect."""
    good, bad = members.epoch("ab"), members.epoch("ab", key="another")
    bad = wire.Epoch(**{**{f: getattr(good, f) for f in good.__struct_fields__}, "key": "another"})
    failed: list[BaseException] = []

    def member(epoch: wire.Epoch, rank: int) -> None:
        try:
            members.join(epoch, rank, seconds=1)
        except CommunicatorAborted as error:
            failed.append(error)

    in_parallel([lambda: member(good, 0), lambda: member(bad, 1)])
    assert len(failed) == 2 and all("in time" in str(error) for error in failed)


def test_many_strangers_are_bounded(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hubs, "MOST_STRANGERS", 8)
    crowd = [socket.create_connection(("127.0.0.1", members.hubs["a"].port)) for _ in range(40)]
    deadline = time.monotonic() + 10
    while len(members.hubs["a"]._strangers) != 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(members.hubs["a"]._strangers) == 8
    assert members.run("ab", everything)
    for sock in crowd:
        sock.close()


def test_an_attempt_ends_when_a_peer_does_not_come(members: Members) -> None:
    members.ports["b"] = 1  # no process listens there
    epoch = members.epoch("ab")
    with pytest.raises(CommunicatorAborted, match="in time"):
        members.join(epoch, 0, seconds=0.3)
    newer = members.epoch("ab")
    threading.Timer(0.2, lambda: members.hubs["a"].close()).start()
    with pytest.raises(CommunicatorAborted, match="closed"):
        members.join(newer, 0)


def test_large_sums_connect_neighbours_when_they_are_needed(members: Members) -> None:
    """On CPUs large tensors use gloo, which connects to two of four peers, when the first is summed."""
    epoch = members.epoch("abcde")
    counts: list[Any] = [None] * 5
    done = threading.Barrier(5)

    def member(rank: int) -> None:
        hub = members.hubs["abcde"[rank]]
        communicator = CpuCommunicator(hub, epoch, rank, "127.0.0.1", timedelta(seconds=20))
        everything(communicator)
        done.wait(20)
        before = len(communicator._gloo._group._connections)
        done.wait(20)
        tensor = torch.ones(LARGE_BYTES // 4)
        communicator.wait(communicator.all_reduce(tensor))
        assert tensor.eq(5).all() and not communicator.released(0)
        done.wait(20)
        counts[rank] = before, len(communicator._gloo._group._connections)
        done.wait(20)
        communicator.close()

    in_parallel([lambda rank=rank: member(rank) for rank in range(5)])
    # All members live in this process: five connections round the ring, seen from both ends.
    assert counts == [(0, 10)] * 5
    assert wait_buried(10)


PEER = """
import sys, time, torch
from datetime import timedelta
from worker.communication.test_links import Members
members = Members("b", {"a": int(sys.argv[1])})
print(members.ports["b"], flush=True)
communicator = members.join(members.epoch("ab"), 1, 30)
communicator.wait(communicator.all_reduce(torch.ones(1)))
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_a_peer_that_dies_or_stops(members: Members, number: signal.Signals) -> None:
    """A dead peer ends the epoch by itself, and the reason names it; a stopped one by an abort only."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", PEER, str(members.ports["a"])]
    peer = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    try:
        assert peer.stdout is not None
        members.ports["b"] = int(peer.stdout.readline())
        epoch = members.epoch("ab")
        communicator = members.join(epoch, 0, seconds=60)
        communicator.wait(communicator.all_reduce(torch.ones(1)))
        assert peer.stdout.readline() == b"ready\n"
        handle = communicator.all_reduce(torch.ones(1 << 22))
        peer.send_signal(number)
        timer = threading.Timer(0.5, lambda: communicator.abort("epoch 2"))
        if number == signal.SIGSTOP:
            timer.start()
        with pytest.raises(CommunicatorAborted, match="epoch 2" if timer.is_alive() else "worker b has ended"):
            communicator.wait(handle)
        assert communicator.broken()
        communicator.close()
    finally:
        peer.kill()
        peer.wait(10)
        assert peer.stdout is not None
        peer.stdout.close()


def test_headers() -> None:
    assert Header(RESUME, 7).packed() != Header(GOODBYE, 7).packed()
    assert len(Header(1, 2**40, 3, 4, 5, 6, 7).packed()) == len(Header(RESUME, 7).packed())


def test_an_error_of_a_further_link_releases_the_transfer_that_needs_it() -> None:
    members, connected = Members("abcdefgh"), threading.Barrier(8)

    def body(communicator: LinkCommunicator) -> None:
        connected.wait(20)  # rank 0 ends the epoch for all

        def broken(_: object, __: int, sock: socket.socket) -> None:
            sock.close()
            raise OSError("too many open files")

        if communicator.rank == 0:
            communicator._hub.adopt = broken  # type: ignore[method-assign]
            with pytest.raises(CommunicatorAborted, match="too many open files"):
                communicator.transfer([Route((0, 3), 1, memory=[torch.zeros(1, dtype=torch.uint8)])])

    members.run("abcdefgh", body)
    members.close()
