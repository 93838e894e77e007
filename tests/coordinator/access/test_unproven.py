"""Connections without a proof of the token are closed after a time-out, and cannot exhaust the descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from coordinator.shell import Coordinator, connected, get, train

from unicron_lightning import wire
from unicron_lightning.coordinator import access
from unicron_lightning.coordinator.access import (
    LOOK_SECONDS,
    PROOF_SECONDS,
    Guard,
    UnprovenConnections,
    excess,
    raise_descriptor_limit,
)
from unicron_lightning.credentials import Token
from unicron_lightning.errors import CoordinatorUnavailable
from unicron_lightning.proof import Transcript, authorization

LIMIT = 128


def test_who_is_closed() -> None:
    ages = {"a": 0.0, "b": 1.0, "c": 2.0, "d": 5.5}
    assert excess(ages, 5.6, 9) == ["a"]
    assert excess(ages, 5.6, 2) == ["a", "b"]
    assert excess(ages, 2.0, 4) == []
    assert excess(ages, 99.0, 4) == list(ages)
    assert PROOF_SECONDS == 5.0


def test_the_limit_of_open_files_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
        assert raise_descriptor_limit() == hard == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_the_log_tells_for_how_many_agents_a_low_limit_suffices(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    guard = Guard(Token(secret="s", origin="test"))
    for limit in (LIMIT, 20_000):
        monkeypatch.setattr(access, "raise_descriptor_limit", lambda limit=limit: limit)
        watch = UnprovenConnections(web.AppRunner(guard.app()), guard.proven)
        watch.start()
        watch.close()
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "descriptors_few limit=128: enough for about 64 agents and daemons"
    ]


class Waiting:
    """A connection without a proof, as aiohttp's server lists it."""

    def __init__(self) -> None:
        self.transport, self.closed = Guard, False

    def force_close(self) -> None:
        self.closed = True


async def test_time_in_which_the_loop_could_not_run_is_not_counted() -> None:
    """Else agents that return together would be closed while they wait for their turn, and return again."""
    now, waiting = 100.0, Waiting()
    runner: Any = SimpleNamespace(server=SimpleNamespace(connections=[waiting]))
    watch = UnprovenConnections(runner, Guard(Token(secret="s", origin="test")).proven, lambda: now)
    watch.start()
    for _ in range(3):
        now += 4.0
        watch.look()
    assert not waiting.closed
    while not waiting.closed:
        now += LOOK_SECONDS
        watch.look()
    watch.close()
    assert 112.0 + PROOF_SECONDS - 4 * LOOK_SECONDS <= now <= 112.0 + PROOF_SECONDS + LOOK_SECONDS


def is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(4096) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


async def closed(connections: list[socket.socket]) -> None:
    deadline = time.monotonic() + 60
    while not all(is_closed(connection) for connection in connections):
        assert time.monotonic() < deadline, "connections without a proof stay open"
        await asyncio.sleep(0.1)


async def test_half_a_request_is_not_waited_for(tmp_path: Path) -> None:
    with Coordinator(tmp_path / "state") as coordinator, contextlib.ExitStack() as stack:
        async with connected(coordinator.url, "a", nodes=(1, 1)) as (a,):
            await train([a])
            address = ("127.0.0.1", coordinator.port)
            idle, half = (stack.enter_context(socket.create_connection(address)) for _ in range(2))
            half.sendall(b"GET /v1/status HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Endless: ")
            await closed([idle, half])
            await a.say(wire.Lookup(worker=a.worker, key="k"))
            assert (await a.hear(wire.LookupReply)).value is None, "an agent's connection stays"


async def test_idle_connections_beyond_the_limit_shut_nobody_out(tmp_path: Path) -> None:
    with Coordinator(tmp_path / "state") as coordinator, contextlib.ExitStack() as stack:
        assert coordinator.process is not None
        async with connected(coordinator.url, "a", nodes=(1, 1)) as (a,):
            await train([a])
            resource.prlimit(coordinator.process.pid, resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
            address = ("127.0.0.1", coordinator.port)
            flood = [stack.enter_context(socket.create_connection(address, timeout=60)) for _ in range(3 * LIMIT)]
            deadline, answered = time.monotonic() + 90, False
            while not answered:
                with contextlib.suppress(CoordinatorUnavailable):
                    answered = list((await get(f"{coordinator.url}/v1/status"))["tasks"]) == ["t"]
                assert time.monotonic() < deadline, "no answer beside idle connections"
            await a.say(wire.Lookup(worker=a.worker, key="k"))
            assert (await a.hear(wire.LookupReply)).value is None
            await closed(flood)
        _, output = coordinator.stop()
        assert "Traceback" not in output
        assert output.count("descriptors_exhausted") < 60


async def test_a_connection_that_is_closed_before_its_request_is_handled() -> None:
    """By its other end, or as one too many: the request is unproven, and no error of the coordinator."""
    guard = Guard(Token(secret="s", origin="test"))
    app = guard.app()
    (authorize,) = app.middlewares
    proof = authorization(
        "s", Transcript(client="a" * 64, server="b" * 112, address="127.0.0.1:1"), "GET", "/v1/status"
    )

    async def handler(request: web.Request) -> web.StreamResponse:
        return await guard._get_challenge(request)

    for path, headers, status in (
        ("/v1/status", {"Authorization": proof}, 401),
        (f"/v1/challenge?nonce={'c' * 64}", {}, 400),
    ):
        request = make_mocked_request("GET", path, headers=headers)
        request.protocol.transport = None
        assert request.transport is None
        assert (await authorize(request, handler)).status == status
