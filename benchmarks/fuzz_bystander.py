"""A task of two agents that trains while others attack its coordinator: nothing of it may change."""

from __future__ import annotations

import asyncio
import os
from types import TracebackType
from typing import Any

import aiohttp

from unicron_lightning import wire
from unicron_lightning.credentials import token_for
from unicron_lightning.link import open_socket
from unicron_lightning.tls import Access

TASK = "bystander"
NAMES = ("bystander-a", "bystander-b")
BEAT_SECONDS = 0.5


class Bystander:
    """Two agents with one worker each, over real WebSockets; for an ``async with`` block."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/v1/agent"
        self._step = 0
        self._shown = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._sockets: list[aiohttp.ClientWebSocketResponse[Any]] = []
        self._settled = asyncio.Event()
        self._heard: list[str] = []

    async def __aenter__(self) -> Bystander:
        self._http = aiohttp.ClientSession()
        for name in NAMES:
            socket = await open_socket(self._http, self._url, Access(token=token_for("127.0.0.1", None)))
            self._sockets.append(socket)
            self._tasks.append(asyncio.create_task(self._listen(name, socket)))
            await _say(socket, _registration(name))
        self._tasks.append(asyncio.create_task(self._train()))
        await asyncio.wait_for(self._settled.wait(), 60)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for socket in self._sockets:
            await socket.close()
        await self._http.close()

    def disturbed(self, status: dict[str, Any]) -> str:
        """What is not as it was, by the coordinator's own account; "" if nothing."""
        task = status["tasks"].get(TASK)
        if self._heard:
            return f"its agents were sent {self._heard}"
        if task is None:
            return "the coordinator does not know it"
        about = {"state": task["state"], "epoch": task["epoch"], "life": task["life"]}
        if about != {"state": "running", "epoch": 1, "life": 1}:
            return f"{about}"
        members = [member["worker"] for member in task["members"]]
        if members != [_worker(name) for name in NAMES]:
            return f"members {members}"
        steps = [member["step"] or 0 for member in task["members"]]
        if min(steps) < self._shown:
            return f"steps {steps} after {self._shown}"
        self._shown = min(steps)
        return ""

    async def _listen(self, name: str, socket: aiohttp.ClientWebSocketResponse[Any]) -> None:
        async for frame in socket:
            message = wire.decode_to_agent(frame.data)
            match message:
                case wire.Grant():
                    await _say(socket, wire.LocalWorld(round=1, size=1))
                    hello = wire.WorkerHello(worker=_worker(name), local_rank=0, pid=os.getpid(), capacity=8)
                    await _say(socket, hello)
                case wire.Welcome():
                    await _say(socket, _ready(name, 0))
                case wire.Epoch() | wire.EpochChange():
                    await _say(socket, _ready(name, message.number))
                case wire.Go():
                    self._settled.set()
                case wire.Stop() | wire.Fence() | wire.Refused() | wire.TaskOver():
                    self._heard.append(type(message).__name__)
        self._heard.append("an end of the connection")

    async def _train(self) -> None:
        while True:
            for name, socket in zip(NAMES, self._sockets, strict=True):
                await _say(socket, wire.Beat())
                if self._settled.is_set():
                    await _say(socket, wire.Progress(worker=_worker(name), step=self._step, metrics={}))
            self._step += self._settled.is_set()
            await asyncio.sleep(BEAT_SECONDS)


def _worker(name: str) -> str:
    return f"{name}/0#1"


def _ready(name: str, epoch: int) -> wire.WorkerReady:
    state = {"step": 0, "has_state": epoch > 0, "founder": epoch == 0}
    return wire.WorkerReady(worker=_worker(name), epoch=epoch, state=state)


def _registration(name: str) -> wire.Register:
    return wire.Register(
        protocol=wire.PROTOCOL_VERSION,
        task=TASK,
        agent=name,
        node=name,
        host="127.0.0.1",
        pid=os.getpid(),
        min_nodes=2,
        max_nodes=2,
        round=1,
        waiting=True,
        granted=False,
        store=wire.Address(host="127.0.0.1", port=1),
        local_world=None,
        workers=[],
        epoch=0,
        secret="cd" * 16,
    )


async def _say(socket: aiohttp.ClientWebSocketResponse[Any], message: wire.Message) -> None:
    await socket.send_str(wire.encode(message).decode())
