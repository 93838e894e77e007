"""Faults injected by an agent, and a connection that is cut silently and heals without loss."""

from __future__ import annotations

import asyncio
import signal
import socket
from typing import Any

import pytest

from unicron_lightning import wire
from unicron_lightning.agent.injection import AgentFaults, Cut


class Agent:
    """Records the effects of its faults."""

    def __init__(self) -> None:
        self.done: list[tuple[Any, ...]] = []
        self.signalled = asyncio.Event()
        self.faults = AgentFaults(
            self.signal,
            lambda worker, message: bool(self.done.append(("told", worker, message.fault))),
            lambda seconds: self.done.append(("cut", seconds)),
        )

    def signal(self, worker: str, number: int) -> None:
        self.done.append((worker, number))
        if number == signal.SIGCONT:
            self.signalled.set()

    def order(self, fault: str, worker: str | None = "w") -> list[tuple[Any, ...]]:
        self.faults.take(wire.Inject(worker=worker, key="k", fault=fault))
        return self.done

    def noted(self, fault: str, strikes: bool = True) -> list[tuple[Any, ...]]:
        self.faults.take(wire.FaultRecorded(worker="w", claim="c", fault=fault, strikes=strikes))
        return self.done


def test_orders_upon_a_worker() -> None:
    assert Agent().order("kill") == [("w", signal.SIGKILL)]
    assert Agent().order("kill SIGTERM") == [("w", signal.SIGTERM)]
    assert Agent().order("stop") == [("w", signal.SIGSTOP)]
    for fault in (
        "hang",
        "raise ecc_error",
        "exit 1",
        "kill step=3",
        "stop phase=commit for=1s",
        "kill coordinator step=1",
    ):
        assert Agent().order(fault) == [("told", "w", fault)]


def test_orders_upon_the_agent() -> None:
    assert Agent().order("drop network for=2s", None) == [("cut", 2.0)]
    assert Agent().order("drop network", None) == [("cut", None)]
    assert Agent().order("melt", None) == [], "a newer coordinator's"


def test_what_a_worker_has_due_is_struck_before_it_is_told() -> None:
    assert Agent().noted("stop") == [("w", signal.SIGSTOP), ("told", "w", "stop")]
    assert Agent().noted("drop network for=1s") == [("cut", 1.0), ("told", "w", "drop network for=1s")]
    assert Agent().noted("kill") == [("told", "w", "kill")], "it kills itself"
    assert Agent().noted("stop", strikes=False) == [("told", "w", "stop")]


async def test_a_stopped_worker_goes_on_when_it_is_over() -> None:
    agent = Agent()
    agent.order("stop for=10ms")
    await asyncio.wait_for(agent.signalled.wait(), 20)
    assert agent.done == [("w", signal.SIGSTOP), ("w", signal.SIGCONT)]


async def connection() -> tuple[asyncio.StreamReader, asyncio.StreamWriter, socket.socket]:
    """Return the end to be cut, and a plain socket at the other end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        other, _ = listener.accept()
    other.setblocking(False)
    return reader, writer, other


async def test_nothing_passes_a_cut_and_nothing_is_lost_by_it() -> None:
    reader, writer, other = await connection()
    loop = asyncio.get_running_loop()
    writer.write(b"before ")
    assert await loop.sock_recv(other, 100) == b"before "
    cut = Cut(writer.transport)
    writer.write(b"meanwhile ")
    await loop.sock_sendall(other, b"to nobody ")
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(reader.read(100), 0.1)
    with pytest.raises(BlockingIOError):
        other.recv(100)
    cut.heal()
    cut.heal()
    writer.write(b"after")
    assert await asyncio.wait_for(reader.readexactly(10), 20) == b"to nobody "
    assert await received(other, 15) == b"meanwhile after"
    writer.close()
    await writer.wait_closed()
    assert await loop.sock_recv(other, 100) == b""
    other.close()


async def test_a_connection_given_up_in_a_cut_ends_for_the_other_end_when_it_heals() -> None:
    _, writer, other = await connection()
    cut = Cut(writer.transport)
    writer.close()
    await writer.wait_closed()
    with pytest.raises(BlockingIOError):
        other.recv(100)
    cut.heal()
    assert await asyncio.get_running_loop().sock_recv(other, 100) == b""
    other.close()


async def received(other: socket.socket, number: int) -> bytes:
    data = b""
    while len(data) < number:
        data += await asyncio.wait_for(asyncio.get_running_loop().sock_recv(other, 100), 20)
    return data
