"""Peers that an agent reaches: real sockets on the loopback device."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest

from unicron_lightning import wire
from unicron_lightning.agent.checks import Prober


@pytest.fixture
def full() -> Iterator[int]:
    """A port whose queue of connections is full: the kernel no longer answers, as if packets were lost."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        port = listener.getsockname()[1]
        waiting = []
        for _ in range(4):
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
            waiting.append(one)
        yield port
        for one in waiting:
            one.close()


async def probe(seconds: float, **ports: int) -> dict[str, str]:
    answers: asyncio.Queue[wire.Message] = asyncio.Queue()
    prober = Prober(answers.put_nowait)
    peers = [wire.Peer(agent=name, host="127.0.0.1", port=port) for name, port in ports.items()]
    prober.begin(wire.Probe(number=3, peers=peers, seconds=seconds))
    answer = await asyncio.wait_for(answers.get(), 60)
    await prober.close()
    assert isinstance(answer, wire.Probed) and answer.number == 3
    assert wire.decode_from_agent(wire.encode(answer)) == answer
    return dict(answer.missed)


async def test_who_listens_is_reached_and_who_does_not_answer_is_not(full: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # bound without listening
        there, refuses = listener.getsockname()[1], bound.getsockname()[1]
        missed = await probe(0.5, there=there, refuses=refuses, silent=full)
    assert missed == {"refuses": "Connection refused", "silent": "Connection timed out after 0.5 s"}


async def test_a_newer_order_replaces_the_one_in_progress(full: int) -> None:
    answers: list[wire.Message] = []
    prober = Prober(answers.append)
    slow = wire.Peer(agent="slow", host="127.0.0.1", port=full)
    prober.begin(wire.Probe(number=1, peers=[slow], seconds=60.0))
    await asyncio.sleep(0)
    prober.begin(wire.Probe(number=2, peers=[], seconds=60.0))
    for _ in range(100):
        if answers:
            break
        await asyncio.sleep(0.01)
    await prober.close()
    assert answers == [wire.Probed(number=2, missed={})]
