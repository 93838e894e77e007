"""What attackers do to a coordinator, one visit at a time; see `fuzz`.

Everything that is sent follows from the random numbers; what comes back is counted and not believed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import urllib.parse
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
from fuzz_messages import AGENTS, NODES, TASKS, Wild

from unicron_lightning.cli.client import request
from unicron_lightning.credentials import token_for
from unicron_lightning.errors import UnicronError
from unicron_lightning.link import open_socket
from unicron_lightning.tls import Access

MOST_FRAMES = 60
SECONDS = 20.0
"""A visit that takes longer is given up: the coordinator may be busy, and its own client finds out."""
GONE = (aiohttp.ClientError, OSError, asyncio.TimeoutError, UnicronError, ConnectionError, RuntimeError)


@dataclass(frozen=True, kw_only=True)
class Target:
    """The coordinator.

    Attributes:
        port: where it listens.
        counts: what was done and what came back.
    """

    port: int
    counts: Counter[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


async def agents(target: Target, chance: random.Random) -> None:
    """An agent, or what calls itself one."""
    wild = Wild(chance)
    await _visit(target, chance, "/v1/agent", wild.register, wild.to_agents_port)


async def daemons(target: Target, chance: random.Random) -> None:
    """A daemon."""
    wild = Wild(chance)
    await _visit(target, chance, "/v1/node", wild.hello, wild.to_nodes_port)


async def orders(target: Target, chance: random.Random) -> None:
    """A proven request: any route, any values. Those that end the bystander rightly are left out."""
    wild = Wild(chance)
    method, path, body = _order(wild, chance)
    with contextlib.suppress(*GONE, ValueError):
        access = Access(token=token_for("127.0.0.1", None))
        status, _ = await asyncio.to_thread(request, f"127.0.0.1:{target.port}", method, path, access, body)
        target.counts[f"http {status}"] += 1


async def strangers(target: Target, chance: random.Random) -> None:
    """A connection without a proof: headers half sent, too long, or none; a body that never comes."""
    with contextlib.suppress(*GONE):
        reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
        try:
            for piece in _pieces(chance):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(chance.random() * 0.2)
            with contextlib.suppress(asyncio.TimeoutError):
                answer = await asyncio.wait_for(reader.read(1 << 16), chance.random() * 3)
                target.counts["answers"] += bool(answer)
        finally:
            writer.transport.abort()


async def frames(target: Target, chance: random.Random) -> None:
    """A proven WebSocket on which no WebSocket frames follow."""
    with contextlib.suppress(*GONE):
        async with aiohttp.ClientSession() as http:
            path = chance.choice(("/v1/agent", "/v1/node"))
            socket = await open_socket(
                http, target.url + path, Access(token=token_for("127.0.0.1", None)), max_msg_size=0
            )
            transport = _transport(socket)
            if transport is None:
                return
            for _ in range(chance.randrange(1, 5)):
                head = bytes((chance.randrange(256), chance.randrange(256)))
                size = chance.choice((b"", b"\xff" * 8, b"\x7f" + b"\xff" * 7, (2**24 + 1).to_bytes(8, "big")))
                body = bytes(chance.randrange(256) for _ in range(chance.randrange(300)))
                transport.write(head + size + body)
                target.counts["messages"] += 1
                await asyncio.sleep(chance.random() * 0.1)
            transport.abort()


async def floods(target: Target, chance: random.Random) -> None:
    """A message as long as is allowed, or a little longer."""
    with contextlib.suppress(*GONE):
        async with aiohttp.ClientSession() as http:
            socket = await open_socket(
                http, f"{target.url}/v1/agent", Access(token=token_for("127.0.0.1", None)), max_msg_size=0
            )
            await socket.send_bytes(Wild(chance).register())
            padding = "a" * (chance.choice((1 << 20, 16 << 20, (16 << 20) + 1)) - 100)
            await socket.send_str(json.dumps({"type": "lookup", "worker": AGENTS[0], "key": padding}))
            target.counts["messages"] += 2
            await asyncio.wait_for(socket.receive(), 5)
            await socket.close()


async def _visit(
    target: Target, chance: random.Random, path: str, first: Callable[[], bytes], further: Callable[[], bytes]
) -> None:
    with contextlib.suppress(*GONE):
        async with aiohttp.ClientSession() as http:
            socket = await open_socket(
                http, target.url + path, Access(token=token_for("127.0.0.1", None)), max_msg_size=0
            )
            listening = asyncio.create_task(_listen(target, socket))
            try:
                if chance.random() < 0.9:
                    await _send(target, chance, socket, first())
                for _ in range(chance.randrange(MOST_FRAMES)):
                    if socket.closed:
                        break
                    await asyncio.wait_for(_send(target, chance, socket, further()), SECONDS)
                    await asyncio.sleep(chance.choice((0.0, 0.0, 0.01, 0.2)))
            finally:
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)
                if chance.random() < 0.5 and (transport := _transport(socket)) is not None:
                    transport.abort()
                await asyncio.wait_for(socket.close(), SECONDS)


def _transport(socket: aiohttp.ClientWebSocketResponse[Any]) -> asyncio.Transport | None:
    """The connection below the WebSocket; None if it has ended."""
    connection = socket._response.connection
    return None if connection is None else connection.transport


async def _listen(target: Target, socket: aiohttp.ClientWebSocketResponse[Any]) -> None:
    async for _ in socket:
        target.counts["answers"] += 1


async def _send(
    target: Target, chance: random.Random, socket: aiohttp.ClientWebSocketResponse[Any], data: bytes
) -> None:
    target.counts["messages"] += 1
    if chance.random() < 0.03:
        await socket.send_bytes(data)
    else:
        await socket.send_frame(data, aiohttp.WSMsgType.TEXT)  # as it is: it need not be UTF-8


def _order(wild: Wild, chance: random.Random) -> tuple[str, str, bytes]:
    task, node = chance.choice((*TASKS, "nobody", "%00")), chance.choice((*NODES, *AGENTS))
    number = urllib.parse.quote(str(chance.choice((wild.number(), wild.text(), "all", 1, 2))), safe="")
    job = {"name": chance.choice(TASKS), "command": ["/nonexistent/fuzz.py"], "max_restarts": 0}
    if chance.random() < 0.7:
        job[chance.choice(("name", "command", "environment", "weight", "max_nodes", "profile", "folder"))] = wild.json()
    if not isinstance(job["name"], str) or "bystander" in job["name"]:
        job["name"] = TASKS[0]
    faults = ("kill rank=0", "hang rank=1 seconds=-1", "kill agent", "cut seconds=1e308", wild.text())
    choices: tuple[tuple[str, str, Any], ...] = (
        ("GET", "/v1/status", None),
        ("GET", f"/v1/events?since={number}&limit={number}&task={task}", None),
        ("GET", f"/v1/incidents?task={task}", None),
        ("GET", "/v1/jobs", None),
        ("GET", f"/v1/jobs/{task}", None),
        ("POST", f"/v1/tasks/{task}/resize?nodes={number}", None),
        ("POST", f"/v1/tasks/{task}/relayout?tp={number}&pp={number}", None),
        ("POST", f"/v1/tasks/{task}/cancel", None),
        ("POST", f"/v1/tasks/{task}/inject", {"fault": chance.choice(faults)}),
        ("POST", f"/v1/nodes/{node}/{chance.choice(('drain', 'undrain', 'undrain'))}", None),
        ("POST", "/v1/jobs", job),
        ("POST", "/v1/jobs", wild.json()),
        (chance.choice(("PUT", "DELETE", "GET", "POST")), f"/{urllib.parse.quote(wild.text())[:2000]}", wild.json()),
    )
    method, path, body = chance.choice(choices)
    data = b"" if body is None else json.dumps(body).encode(errors="replace")
    return method, path, wild.damaged(data) if data and chance.random() < 0.1 else data


def _pieces(chance: random.Random) -> list[bytes]:
    proof = b"Authorization: Unicron " + b":".join(b"0" * size for size in (64, 112, 64))
    whole = chance.choice(
        (
            b"GET /v1/status HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
            b"GET /v1/agent HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
            b"GET /v1/challenge?nonce="
            + b"0" * chance.choice((63, 64, 9000))
            + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999999\r\n" + proof + b"\r\n\r\nabc",
            b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
            + proof
            + b"\r\n\r\nffffffff\r\n",
            b"GET / HTTP/1.1\r\nHost: evil.example\r\nOrigin: http://evil.example\r\n\r\n",
            b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: %s\r\n" % (n, b"a" * 500) for n in range(200)) + b"\r\n",
            bytes(chance.randrange(256) for _ in range(chance.randrange(1, 400))),
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        )
    )
    if chance.random() < 0.5:
        whole = whole[: chance.randrange(len(whole) + 1)]
    cuts = sorted(chance.randrange(len(whole) + 1) for _ in range(chance.randrange(4)))
    return [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True) if b > a]


ATTACKS: dict[Callable[[Target, random.Random], Awaitable[None]], float] = {
    agents: 10.0,
    daemons: 3.0,
    orders: 6.0,
    strangers: 4.0,
    frames: 2.0,
    floods: 0.3,
}
