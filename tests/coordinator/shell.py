"""A real coordinator process, and agents that communicate with it over real sockets."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from unicron_lightning import wire
from unicron_lightning.cli.client import request
from unicron_lightning.credentials import Token, token_for
from unicron_lightning.link import open_socket
from unicron_lightning.local_cluster.processes import free_port
from unicron_lightning.tls import Access
from unicron_lightning.wire.epoch_changes import changed

NO_STORE = wire.Address(host="127.0.0.1", port=1)
"""No server listens there, which is no evidence of death: the address has never been reached."""


class Coordinator:
    """``python -m unicron_lightning.coordinator`` on a free port."""

    def __init__(self, state_dir: Path, *overrides: str, port: int = 0, env: dict[str, str] | None = None) -> None:
        self.state_dir = state_dir
        self.port = port or free_port()
        self.overrides = overrides
        self.env = {**os.environ, **(env or {})}
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> Coordinator:
        """Start the process and wait until it answers."""
        self.spawn()
        deadline = time.monotonic() + 20
        while not answers(self.port):
            assert self.process is not None
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return self

    def spawn(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "unicron_lightning.coordinator", f"coordinator.port={self.port}"]
        command += [f"store.state_dir={self.state_dir}", *self.overrides]
        self.process = subprocess.Popen(command, env=self.env, stderr=subprocess.PIPE, text=True)
        return self.process

    def output(self) -> str:
        """Wait for the process's end; return the end of its output."""
        assert self.process is not None
        return self.process.communicate(timeout=20)[1]

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=20)

    def stop(self) -> tuple[int, str]:
        """Stop it cleanly; return its status and its output."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.terminate()
        output = self.output()
        return self.process.returncode, output

    def __enter__(self) -> Coordinator:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.stderr is not None and not self.process.stderr.closed:
            self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class SocketAgent:
    """An agent with one worker, over a real WebSocket."""

    def __init__(self, name: str, nodes: tuple[int, int], socket_: aiohttp.ClientWebSocketResponse[Any]) -> None:
        self.name = name
        self.nodes = nodes
        self.socket = socket_
        self.store: wire.Address | None = None
        self.epoch: wire.Epoch | None = None

    @property
    def worker(self) -> str:
        return f"{self.name}/0#1"

    async def say(self, message: wire.FromAgent) -> None:
        await self.socket.send_str(wire.encode(message).decode())

    async def hear(self, kind: type[Any]) -> Any:
        """Return the next message of that kind; skip others."""
        while True:
            frame = await self.socket.receive(timeout=10)
            assert frame.type is aiohttp.WSMsgType.TEXT, frame
            message = wire.decode_to_agent(frame.data)
            if isinstance(message, wire.EpochChange):
                message = changed(self.epoch, message)
            if isinstance(message, wire.Epoch):
                self.epoch = message
            if isinstance(message, kind):
                return message

    async def register(self, **changes: Any) -> None:
        fields: dict[str, Any] = {
            "protocol": wire.PROTOCOL_VERSION,
            "task": "t",
            "agent": self.name,
            "node": self.name,
            "host": "127.0.0.1",
            "pid": os.getpid(),
            "min_nodes": self.nodes[0],
            "max_nodes": self.nodes[1],
            "round": 1,
            "waiting": True,
            "granted": False,
            "store": self.store or NO_STORE,
            "local_world": None,
            "workers": [],
            "epoch": 0,
        }
        await self.say(wire.Register(**{**fields, **changes}))

    async def boot(self) -> None:
        """Proceed from the grant to a worker that waits to become a member."""
        await self.hear(wire.Grant)
        await self.say(wire.LocalWorld(round=1, size=1))
        await self.say(self.hello())
        await self.hear(wire.Welcome)
        await self.ready(0)

    def hello(self) -> wire.WorkerHello:
        return wire.WorkerHello(worker=self.worker, local_rank=0, pid=os.getpid(), capacity=8)

    def report(self, epoch: int) -> wire.WorkerReady:
        return wire.WorkerReady(worker=self.worker, epoch=epoch, state={"step": epoch, "has_state": True})

    async def ready(self, epoch: int) -> None:
        await self.say(self.report(epoch))

    def back(self, *, ready: int, epoch: int) -> dict[str, Any]:
        """State of a live worker in a registration."""
        info = wire.WorkerInfo(worker=self.worker, local_rank=0, hello=self.hello(), ready=self.report(ready))
        return {"waiting": False, "granted": True, "local_world": 1, "workers": [info], "epoch": epoch}


@asynccontextmanager
async def connected(
    url: str, *names: str, nodes: tuple[int, int] = (1, 4), token: str | None = None, forwarded: bool = False
) -> AsyncIterator[list[SocketAgent]]:
    """Agents with open connections that have sent nothing yet."""
    async with aiohttp.ClientSession() as http:
        given = replace(access(token), forwarded=forwarded)
        sockets = [await open_socket(http, f"{url}/v1/agent", given) for _ in names]
        try:
            yield [SocketAgent(name, nodes, socket_) for name, socket_ in zip(names, sockets, strict=True)]
        finally:
            for socket_ in sockets:
                await socket_.close()


async def train(agents: list[SocketAgent]) -> None:
    """Bring a task of these agents to its settled first epoch."""
    for agent in agents:
        await agent.register()
    await asyncio.gather(*(agent.boot() for agent in agents))
    for agent in agents:
        assert (await agent.hear(wire.Epoch)).number == 1
        await agent.ready(1)
    for agent in agents:
        assert (await agent.hear(wire.Go)).epoch == 1


def known(token: str | None = None) -> Token:
    """Return a token; default: that of the user who runs the tests."""
    return token_for("127.0.0.1", None) if token is None else Token(secret=token, origin="a test")


def access(token: str | None = None) -> Access:
    """Return the access with a token; default: that of the user who runs the tests."""
    return Access(token=known(token))


async def ask(url: str, method: str, target: str, body: bytes = b"", token: str | None = None) -> tuple[int, Any]:
    """Return status and decoded answer of a proven request."""
    endpoint = url.removeprefix("http://")
    status, answer = await asyncio.to_thread(request, endpoint, method, target, access(token), body)
    return status, json.loads(answer)


async def get(url: str, token: str | None = None) -> Any:
    place, _, target = url.removeprefix("http://").partition("/")
    status, answer = await ask(place, "GET", f"/{target}", token=token)
    assert status == 200, answer
    return answer


def answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False
