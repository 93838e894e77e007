"""Coordinator for tests of the agent alone: sends standard answers, records messages, and sends others on request."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from aiohttp import WSMsgType, web

from unicron_lightning import wire
from unicron_lightning.coordinator.access import Guard
from unicron_lightning.credentials import token_for

M = TypeVar("M", bound=wire.Message)


class FakeCoordinator:
    """Grants all agents together as soon as ``agents`` wait; one agent's slot again at once. Queries are thread-safe.

    ``answers`` may be switched off to test behaviour without them.
    """

    def __init__(self, agents: int = 1) -> None:
        self.agents = agents
        self.answers = True
        self.busy_seconds = 0.0
        """Time after a registration in which nothing is read; then something is sent first."""
        self.refuse: str | None = None
        self.worker_timeout: float | None = None
        self.said: list[tuple[str, wire.Message]] = []
        self.registers: list[wire.Register] = []
        self.port = 0
        self._condition = threading.Condition()
        self._sockets: dict[str, web.WebSocketResponse] = {}
        self._waiting: dict[str, tuple[int, wire.Address]] = {}
        self._order: list[str] = []
        self._stores: dict[str, wire.Address] = {}
        self._sizes: dict[str, int] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    # ---- used by the test

    @contextlib.contextmanager
    def serving(self, port: int = 0) -> Iterator[FakeCoordinator]:
        """Serve in a thread."""
        ready, stop = threading.Event(), asyncio.Event()
        thread = threading.Thread(target=lambda: asyncio.run(self._serve(port, ready, stop)))
        thread.start()
        assert ready.wait(60)
        try:
            yield self
        finally:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(stop.set)
            thread.join(60)

    def wait_for(self, kind: type[M], match: Callable[[M], bool] = lambda _: True, seconds: float = 60.0) -> M:
        """Wait for a message of this type from an agent; return the first."""

        def find() -> M | None:
            return next((m for _, m in self.said if isinstance(m, kind) and match(m)), None)

        with self._condition:
            assert self._condition.wait_for(lambda: find() is not None, seconds), f"no {kind.__name__} in {self.said}"
            found = find()
            assert found is not None
            return found

    def count(self, kind: type[wire.Message]) -> int:
        """Return the number of messages of this type."""
        with self._condition:
            return sum(isinstance(message, kind) for _, message in self.said)

    def send(self, message: wire.Message, agent: str | None = None) -> None:
        """Send to one agent, by default to all."""
        assert self._loop is not None
        for name, socket in list(self._sockets.items()):
            if agent in (None, name):
                text = wire.encode(message).decode()
                asyncio.run_coroutine_threadsafe(socket.send_str(text), self._loop).result(5)

    def drop(self) -> None:
        """Break all connections without a closing handshake."""
        assert self._loop is not None
        for socket in list(self._sockets.values()):
            transport = socket._req.transport if socket._req is not None else None
            if transport is not None:
                self._loop.call_soon_threadsafe(transport.abort)
        deadline = time.monotonic() + 5
        while self._sockets and time.monotonic() < deadline:
            time.sleep(0.005)

    # ---- the server

    async def _serve(self, port: int, ready: threading.Event, stop: asyncio.Event) -> None:
        self._loop = asyncio.get_running_loop()
        app = Guard(token_for("127.0.0.1", None)).app()
        app.router.add_get("/v1/agent", self._session)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        self.port = runner.addresses[0][1]
        ready.set()
        await stop.wait()
        for socket in list(self._sockets.values()):
            await socket.close()
        await runner.cleanup()

    async def _session(self, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        agent = ""
        async for frame in socket:
            if frame.type is not WSMsgType.TEXT:
                continue
            message: Any = wire.decode_from_agent(frame.data)
            if isinstance(message, wire.Register):
                agent = message.agent
                self._sockets[agent] = socket
                await self._welcome(socket, message)
            with self._condition:
                self.said.append((agent, message))
                self._condition.notify_all()
            if self.answers:
                await self._answer(agent, message)
                if isinstance(message, wire.Bye):
                    await socket.close()
        if self._sockets.get(agent) is socket:
            del self._sockets[agent]
        return socket

    async def _welcome(self, socket: web.WebSocketResponse, message: wire.Register) -> None:
        self.registers.append(message)
        if self.refuse is not None:
            await socket.send_str(wire.encode(wire.Refused(reason=self.refuse)).decode())
            return
        registered = wire.Registered(coordinator="fake", worker_timeout=self.worker_timeout)
        await socket.send_str(wire.encode(registered).decode())
        if self.busy_seconds:
            time.sleep(self.busy_seconds)  # noqa: ASYNC251 the loop stands still
            for _ in range(3):
                notice = wire.Notice(name="busy", at=0.0, incident=None, fields={})
                await socket.send_str(wire.encode(notice).decode())
                time.sleep(0.05)  # noqa: ASYNC251

    async def _answer(self, agent: str, message: Any) -> None:
        match message:
            case wire.Register() if message.waiting and message.store is not None:
                await self._rendezvous(agent, message.round, message.store)
            case wire.RendezvousBegin():
                await self._rendezvous(agent, message.round, message.store)
            case wire.LocalWorld():
                self._sizes[agent] = message.size
                if all(name in self._sizes for name in self._order):
                    await self._rank()
            case wire.WorkerHello():
                await self._to(agent, wire.Welcome(worker=message.worker, founder=True, life=1, resume=()))
            case wire.Lookup():
                await self._to(agent, wire.LookupReply(worker=message.worker, key=message.key, value="kept"))

    async def _rendezvous(self, agent: str, number: int, store: wire.Address) -> None:
        self._stores[agent] = store
        self._sizes.pop(agent, None)
        self._waiting[agent] = (number, store)
        if len(self._order) < self.agents and len(self._waiting) < self.agents:
            return
        for name, (round_number, _) in list(self._waiting.items()):
            if name in self._order:
                self._order.remove(name)
            self._order.append(name)
            self._waiting[name] = (round_number, store)
        waiting, self._waiting = self._waiting, {}
        for name, (round_number, _) in waiting.items():
            rank = self._order.index(name)
            grant = wire.Grant(
                round=round_number,
                group_rank=rank,
                group_world=len(self._order),
                master=self._stores[self._order[0]],
            )
            await self._to(name, grant)

    async def _rank(self) -> None:
        base = 0
        world = sum(self._sizes[name] for name in self._order)
        for name in self._order:
            number = max(r.round for a, r in self._rounds() if a == name)
            await self._to(name, wire.Ranks(round=number, base=base, world=world))
            base += self._sizes[name]

    def _rounds(self) -> list[tuple[str, Any]]:
        return [(a, m) for a, m in self.said if isinstance(m, (wire.Register, wire.RendezvousBegin, wire.LocalWorld))]

    async def _to(self, agent: str, message: wire.Message) -> None:
        await self._sockets[agent].send_str(wire.encode(message).decode())
