"""The mutual proof over real sockets: an impostor of the coordinator, or of a client, learns nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from coordinator.shell import Coordinator, access, ask

from unicron_lightning import wire
from unicron_lightning.agent.coordinator_session import CoordinatorSession, SessionHooks
from unicron_lightning.cli.client import fetch
from unicron_lightning.credentials import Token
from unicron_lightning.errors import CoordinatorUnavailable, CoordinatorUnproven, UnicronError
from unicron_lightning.link import open_socket
from unicron_lightning.node.daemon import NodeLink
from unicron_lightning.proof import Transcript, authorization, new_nonce
from unicron_lightning.tls import Access
from unicron_lightning.wire.daemon import NodeHello, NodeRun

SECRET = "a secret that must not be sent"
TOKEN = Token(secret=SECRET, origin="a test")


class Impostor:
    """Listens in place of a coordinator, accepts all requests and WebSockets, and keeps the data it receives.

    Args:
        coordinator: port of a coordinator that it asks for challenges; None: it invents them.
    """

    def __init__(self, coordinator: int | None = None) -> None:
        self.coordinator = coordinator
        self.port = 0
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.frames: list[Any] = []
        self.changed = asyncio.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def paths(self) -> set[str]:
        return {path for path, _, _ in self.requests}

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Impostor]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._serve)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.port = runner.addresses[0][1]
            yield self
        finally:
            await runner.cleanup()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((request.path, dict(request.headers), await request.read()))
        self.changed.set()
        if request.path == "/v1/challenge":
            return await self._challenge(request)
        if request.headers.get("Upgrade", "").lower() != "websocket":
            return web.json_response({"tasks": {}})
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        order = NodeRun(launches=[])
        with contextlib.suppress(ConnectionError):
            await socket.send_str(wire.encode(order).decode())
            self.frames += [frame.data async for frame in socket]
        return socket

    async def _challenge(self, request: web.Request) -> web.Response:
        if self.coordinator is None:
            return web.json_response({"nonce": "0" * 112, "address": "x", "proof": "0" * 64})
        url = f"http://127.0.0.1:{self.coordinator}{request.raw_path}"
        async with aiohttp.ClientSession() as http, http.get(url) as answer:
            return web.Response(body=await answer.read())

    def learned_nothing(self) -> None:
        """It received requests for challenges and nothing else."""
        assert self.paths == {"/v1/challenge"}
        assert self.frames == []
        assert SECRET not in repr(self.requests)
        assert not any("Authorization" in headers for _, headers, _ in self.requests)


@asynccontextmanager
async def impostor(coordinator: int | None = None) -> AsyncIterator[Impostor]:
    async with Impostor(coordinator).serving() as served:
        yield served


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    with Coordinator(tmp_path / "state", env={"UNICRON_TOKEN": SECRET}) as started:
        yield started


async def nothing() -> None:
    pass


def session(url: str, *, forwarded: bool = False) -> CoordinatorSession:
    def register() -> wire.Register:
        raise AssertionError("an impostor was told of the agent")

    hooks = SessionHooks(
        register=register, received=lambda _: None, nothing_listens=nothing, not_answering=lambda: None
    )
    return CoordinatorSession(f"{url}/v1/agent", Access(token=TOKEN, forwarded=forwarded), 2.0, hooks)


async def test_an_agent_tells_an_impostor_nothing_and_tries_on(caplog: pytest.LogCaptureFixture) -> None:
    async with impostor() as false:
        with pytest.raises(CoordinatorUnavailable, match="cannot prove that it knows the token"):
            await session(false.url).run()
        false.learned_nothing()
        assert len(false.requests) > 1, "it tried again until its time was over"
    told = [record for record in caplog.records if "coordinator_unproven" in record.message]
    assert len(told) == 1, "once"


async def test_a_daemon_takes_no_orders_from_an_impostor(caplog: pytest.LogCaptureFixture) -> None:
    orders: list[NodeRun] = []

    def hello() -> NodeHello:
        raise AssertionError("an impostor was told of the daemon")

    async with impostor() as false:
        with caplog.at_level(logging.WARNING):
            running = asyncio.create_task(
                NodeLink(f"{false.url}/v1/node", Access(token=TOKEN), hello, orders.append).run()
            )
            while len(false.requests) < 3:
                false.changed.clear()
                await asyncio.wait_for(false.changed.wait(), 60)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        false.learned_nothing()
    assert orders == []
    assert len([each for each in caplog.records if "cannot prove" in each.getMessage()]) == 1


async def test_a_command_sends_an_impostor_nothing() -> None:
    async with impostor() as false:
        with pytest.raises(CoordinatorUnproven, match=f"what answers at 127.0.0.1:{false.port} cannot prove"):
            await asyncio.to_thread(
                fetch, f"127.0.0.1:{false.port}", "/v1/jobs", Access(token=TOKEN), method="POST", body={"name": "j"}
            )
        false.learned_nothing()


async def test_an_order_that_is_too_large_is_not_taken_for_an_impostor(coordinator: Coordinator) -> None:
    """The coordinator answers it before it can check its proof, and so without one of its own."""
    place, access = coordinator.url.removeprefix("http://"), Access(token=TOKEN)
    frame = len(json.dumps({"name": ""}))
    for size, refusal in (
        (1 << 20, r"/v1/jobs has 1048576 bytes: expected < 1048576"),
        ((1 << 20) - 1, "expected a job"),
    ):
        body = {"name": "n" * (size - frame)}
        with pytest.raises(UnicronError, match=refusal):
            await asyncio.to_thread(fetch, place, "/v1/jobs", access, method="POST", body=body)


async def test_one_that_forwards_challenges_gets_no_proofs(coordinator: Coordinator) -> None:
    async with impostor(coordinator.port) as false:
        with pytest.raises(CoordinatorUnavailable, match="forwards to a coordinator at"):
            await session(false.url).run()
        with pytest.raises(CoordinatorUnproven, match="forwards to a coordinator at"):
            await asyncio.to_thread(fetch, f"127.0.0.1:{false.port}", "/v1/status", Access(token=TOKEN))
        false.learned_nothing()


async def test_one_that_takes_over_after_the_challenge_is_not_believed(coordinator: Coordinator) -> None:
    """As if the port had changed hands between the challenge and the request."""
    async with impostor(coordinator.port) as false:
        with pytest.raises(CoordinatorUnavailable, match="cannot prove"):
            await session(false.url, forwarded=True).run()
        access = Access(token=TOKEN, forwarded=True)
        with pytest.raises(CoordinatorUnproven, match="cannot prove"):
            await asyncio.to_thread(fetch, f"127.0.0.1:{false.port}", "/v1/status", access)
        assert false.frames == []
        assert SECRET not in repr(false.requests)


async def test_a_wrong_token_is_refused_by_both_ends(coordinator: Coordinator) -> None:
    async with aiohttp.ClientSession() as http:
        with pytest.raises(CoordinatorUnproven, match="cannot prove that it knows the token"):
            await open_socket(http, f"{coordinator.url}/v1/agent", access("wrong"))
        transcript = await challenge(http, coordinator.url)
        for path in ("/v1/agent", "/v1/status"):
            headers = {"Authorization": authorization("wrong", transcript, "GET", path)}
            async with http.get(coordinator.url + path, headers=headers) as answer:
                assert answer.status == 401


async def test_a_header_is_good_once_and_for_its_request_alone(coordinator: Coordinator) -> None:
    async with aiohttp.ClientSession() as http:
        transcript = await challenge(http, coordinator.url)
        headers = {"Authorization": authorization(SECRET, transcript, "GET", "/v1/status")}
        statuses = []
        for path in ("/v1/events", "/v1/status?x", "/v1/status", "/v1/status"):
            async with http.get(coordinator.url + path, headers=headers) as answer:
                statuses.append(answer.status)
        assert statuses == [401, 401, 200, 401], "the last is a replay"
    assert (await ask(coordinator.url, "POST", "/v1/tasks/t/cancel", token=SECRET))[0] == 404


async def challenge(http: aiohttp.ClientSession, url: str) -> Transcript:
    client = new_nonce()
    async with http.get(f"{url}/v1/challenge?nonce={client}") as answer:
        found = json.loads(await answer.text())
    return Transcript(client=client, server=found["nonce"], address=found["address"])
