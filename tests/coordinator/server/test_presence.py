"""A dead agent is distinguished from a broken link, with real sockets."""

from __future__ import annotations

import asyncio
import socket
from functools import partial

import pytest

from unicron_lightning import wire
from unicron_lightning.coordinator.server import peers
from unicron_lightning.coordinator.server.peers import Presence, refuses


def listening() -> tuple[socket.socket, wire.Address]:
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, wire.Address(host="127.0.0.1", port=listener.getsockname()[1])


async def done(watched: Presence) -> None:
    """Wait until all checks are over."""
    await asyncio.wait_for(asyncio.gather(*watched._tasks), 20)


def test_who_listens_no_more_refuses() -> None:
    listener, address = listening()
    assert asyncio.run(refuses(address, 0.1)) is False, "it has accepted and says nothing"
    listener.close()
    assert asyncio.run(refuses(address, 5)) is True


def test_an_answer_in_the_middle_of_a_death_is_asked_again() -> None:
    listener, address = listening()

    async def run() -> bool:
        asking = asyncio.create_task(refuses(address, 20))
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        connection, _ = await loop.sock_accept(listener)
        listener.close()
        connection.close()
        return await asking

    assert asyncio.run(run()) is True


def test_only_a_dead_process_is_told() -> None:
    listener, address = listening()
    dying_listener, dying = listening()

    async def run() -> list[int]:
        watched, gone = Presence(), list[int]()
        watched.record_store(1, address)
        watched.record_store(2, dying)
        watched.record_store(3, None)
        await done(watched)
        dying_listener.close()
        for conn in (1, 2, 3, 4):
            watched.ended(conn, partial(gone.append, conn))
        await done(watched)
        await watched.close()
        return gone

    with listener:
        assert asyncio.run(run()) == [2]


@pytest.mark.parametrize("here", [True, False])
def test_a_refusal_counts_only_where_a_connection_has_succeeded(monkeypatch: pytest.MonkeyPatch, here: bool) -> None:
    if not here:
        monkeypatch.setattr(peers, "_HERE", frozenset())
        monkeypatch.setattr(peers, "FIRST_LOOK_SECONDS", 0.01)
    listener, address = listening()
    dead_listener, dead = listening()
    dead_listener.close()

    async def run() -> list[int]:
        watched, gone = Presence(), list[int]()
        watched.record_store(1, address)
        watched.record_store(2, dead)
        watched.record_store(3, address)
        watched.record_store(3, dead)  # a new round: an earlier connection is no evidence for it
        await done(watched)
        listener.close()
        for conn in (1, 2, 3):
            watched.ended(conn, partial(gone.append, conn))
        await done(watched)
        return gone

    assert asyncio.run(run()) == [1]
