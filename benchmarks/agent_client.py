"""Simulated agents: a client process of `agents` and `storms`, kept small, as it shares the coordinator's cores.

Orders arrive as JSON lines on stdin; observations are written to stdout in the same form. An agent behaves as a real
one: it proves the token, registers, sends beats, reports its worker's progress, answers every epoch, and returns with
the same back-off after its connection has ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from unicron_lightning import wire
from unicron_lightning.credentials import token_for
from unicron_lightning.link import retry_delay
from unicron_lightning.proof import Meeting, authorization, new_nonce
from unicron_lightning.wire.epoch_changes import changed

QUIET_SECONDS = 0.3
"""Time without a further arrival after which a client reports an epoch."""
BACK_SECONDS = 2.0
"""Delay between the end of a worker, or agent, and the start of its replacement."""
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 0.05, 2.0
"""As of `agent.link.session`, which this process does not import, since it needs torch."""
AT_ONCE = 200
"""Agents that connect at the same time at the start."""
HANDSHAKE = (
    "GET /v1/agent HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
    "Authorization: {authorization}\r\n\r\n"
)


class Link(asyncio.Protocol):
    """One connection of an agent.

    Args:
        agent: the owner.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._buffer = bytearray()
        self._open = False
        self._nonce = new_nonce()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport.write(f"GET /v1/challenge?nonce={self._nonce} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())

    def connection_lost(self, exc: Exception | None) -> None:
        self._agent.lost(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._nonce and not self._challenged():
            return
        if not self._open:
            head = self._buffer.find(b"\r\n\r\n")
            if head < 0:
                return
            if not self._buffer.startswith(b"HTTP/1.1 101"):
                self.close()
                return
            del self._buffer[: head + 4]
            self._open = True
            self._agent.opened(self)
        for kind, payload in self._frames():
            if kind == 1:
                self._agent.hear(payload)
            elif kind == 9:
                self._write(10, payload)

    def say(self, message: wire.Message) -> None:
        """Send a message, unless the connection is not open."""
        if self._open:
            self._write(1, wire.encode(message))

    def close(self) -> None:
        """Abort the connection without a message."""
        self._open = False
        if self._transport is not None:
            self._transport.abort()

    def _challenged(self) -> bool:
        """Answer the coordinator's challenge once it has arrived completely; its content is trusted."""
        _, gap, body = bytes(self._buffer).partition(b"\r\n\r\n")
        if not gap or not body.endswith(b"}"):
            return False
        found = json.loads(body)
        meeting = Meeting(client=self._nonce, server=found["nonce"], address=found["address"])
        shown = authorization(token_for("127.0.0.1", None).secret, meeting, "GET", "/v1/agent")
        self._nonce = ""
        self._buffer.clear()
        assert self._transport is not None
        self._transport.write(HANDSHAKE.format(authorization=shown).encode())
        return True

    def _frames(self) -> Iterator[tuple[int, bytes]]:
        while len(buffer := self._buffer) >= 2:
            size, start = buffer[1] & 0x7F, 2
            if size == 126 and len(buffer) >= 4:
                size, start = struct.unpack_from("!H", buffer, 2)[0], 4
            elif size == 127 and len(buffer) >= 10:
                size, start = struct.unpack_from("!Q", buffer, 2)[0], 10
            elif size >= 126:
                return
            if len(buffer) < start + size:
                return
            frame = buffer[0] & 0x0F, bytes(buffer[start : start + size])
            del buffer[: start + size]
            yield frame

    def _write(self, kind: int, payload: bytes) -> None:
        size = len(payload)
        length = struct.pack("!B", 0x80 | size) if size < 126 else struct.pack("!BH", 254, size)
        assert self._transport is not None
        # Masked with zeros, which leaves the payload unchanged.
        self._transport.write(bytes([0x80 | kind]) + length + bytes(4) + payload)


class Agent:
    """One agent with one worker.

    Args:
        client: notified of epochs.
        name: the agent's id.
        task: the agent's task.
        nodes: least and most nodes of the task.
    """

    def __init__(self, client: Client, name: str, task: str, nodes: tuple[int, int]) -> None:
        self.client, self.name, self.task, self.nodes = client, name, task, nodes
        self.round, self.step, self.epoch, self.gone = 1, 0, 0, 0
        self.dead = self.registered = False
        self.link: Link | None = None
        self._granted = self._launched = False
        self._founder = True
        self._kind = ""
        self._hello: wire.WorkerHello | None = None
        self._last: wire.WorkerReady | None = None
        self._retry = FIRST_RETRY_SECONDS
        self._progress_seconds = self._progress_due = 0.0
        self._beats: asyncio.TimerHandle | None = None

    @property
    def worker(self) -> str:
        return f"{self.name}/0#{self.round}"

    # ---- its connection

    async def connect(self) -> None:
        """Open a connection; try again later if there is no coordinator."""
        try:
            await asyncio.get_running_loop().create_connection(lambda: Link(self), "127.0.0.1", self.client.port)
        except OSError:
            self._again()

    def opened(self, link: Link) -> None:
        """Register."""
        if self.dead:
            link.close()
            return
        self.link = link
        info = wire.WorkerInfo(worker=self.worker, local_rank=0, hello=self._hello, ready=self._last)
        self.say(
            wire.Register(
                protocol=wire.PROTOCOL_VERSION,
                task=self.task,
                agent=self.name,
                node=self.name,
                host="127.0.0.1",
                pid=os.getpid(),
                min_nodes=self.nodes[0],
                max_nodes=self.nodes[1],
                round=self.round,
                waiting=not self._granted,
                granted=self._granted,
                store=self._store(),
                local_world=1 if self._launched else None,
                workers=[info] if self._launched else [],
                epoch=self.epoch,
            )
        )

    def lost(self, link: Link) -> None:
        """Return, as a real agent does."""
        if link is self.link or self.link is None:
            self.link, self.registered = None, False
            if self._beats is not None:
                self._beats.cancel()
            if not self.dead:
                self._again()

    def _again(self) -> None:
        self.client.later(retry_delay(self._retry), lambda: self.client.start(self.connect()))
        self._retry = min(2 * self._retry, LAST_RETRY_SECONDS)

    def say(self, message: wire.Message) -> None:
        if self.link is not None:
            self.link.say(message)

    def _store(self) -> wire.Address:
        # nothing listens there, and only a refusal after a successful connection is evidence of death
        return wire.Address(host="127.0.0.1", port=20_000 + self.round)

    def _beat(self, seconds: float) -> None:
        self.say(wire.Beat())
        self._beats = asyncio.get_running_loop().call_later(seconds, self._beat, seconds)

    # ---- messages

    def hear(self, payload: bytes) -> None:
        """Process a message of the coordinator."""
        now = time.monotonic()
        name = payload[9 : payload.index(b'"', 9)]
        self.client.received[name.decode()] += len(payload)
        if name in (b"epoch", b"epoch_change"):
            self._new_epoch(payload, now)
        elif name == b"registered":
            self._retry = FIRST_RETRY_SECONDS
            self.client.connected, self.registered = now, True
            told = json.loads(payload)
            beat, self._progress_seconds = told["beat"], told["progress"]
            self._beats = asyncio.get_running_loop().call_later(retry_delay(beat), self._beat, beat)
        elif name == b"grant":
            self._granted = self._launched = True
            self._hello = wire.WorkerHello(worker=self.worker, local_rank=0, pid=os.getpid(), capacity=100_000)
            self.say(wire.LocalWorld(round=self.round, size=1))
            self.say(self._hello)
        elif name == b"welcome":
            self._founder = wire.decode_to_agent(payload).founder  # type: ignore[union-attr]
            self._ready(0)
        elif name == b"go":
            go = json.loads(payload)["epoch"]
            self.client.settled(self, go, now)
            self._first_step(go)
        elif name in (b"fence", b"stop"):
            self.client.notes["restarted"] += 1
            self.die(said=False)
        elif name in (b"refused", b"task_over"):
            print(f"{self.name} received {payload[:200]!r}", file=sys.stderr)

    def _new_epoch(self, payload: bytes, now: float) -> None:
        epoch = self.client.derive(self.task, payload, self.epoch)
        if epoch is None:
            self.say(wire.EpochWanted(epoch=self.epoch))
            return
        if epoch.number > self.epoch:
            self.client.arrived(self.task, epoch.number, epoch.kind, now)
        self.epoch, self._kind = epoch.number, epoch.kind
        if self.worker in self.client.members(self.task, epoch):  # else this worker has left
            self._ready(self.epoch)

    def _ready(self, epoch: int) -> None:
        # The state has the size of a real worker's.
        state = {"position": self.step, "step": self.step, "has_state": epoch > 0, "operation": "step"}
        report = {"finished": [0, 1, 2], "reduced": [0, 1, 2, 3]}
        about = {**state, "report": report} if epoch else {**state, "founder": self._founder}
        self._last = wire.WorkerReady(worker=self.worker, epoch=epoch, state=about)
        self.say(self._last)

    def _first_step(self, epoch: int) -> None:
        name = {"fail": "recovered", "join": "grown", "leave": "shrunk"}.get(self._kind, "started")
        self.step = max(self.step, int(time.time()))
        fields = {"epoch": epoch, "step": self.step, "world": 0, "recomputed": []}
        self.say(wire.WorkerEvent(worker=self.worker, name=name, at=time.time(), fields=fields))

    def progress(self) -> None:
        """Send the progress report that a worker's control thread sends once a second; a step takes one, too."""
        now = time.monotonic()
        if self.epoch and not self.dead and now >= self._progress_due:
            self._progress_due = now + self._progress_seconds
            self.step = int(time.time())
            metrics: dict[str, float | None] = {"loss": 1.25}
            self.say(wire.Progress(worker=self.worker, step=self.step, metrics=metrics, at=time.time()))

    # ---- faults

    def die(self, *, said: bool = True) -> None:
        """Report the worker's death; torchrun starts another one after `BACK_SECONDS`."""
        if said:
            self.say(wire.WorkerDied(worker=self.worker, cause="signal", code=9, at=time.time()))
        self.epoch, self._granted, self._launched = 0, False, False
        self._hello = self._last = None
        self.client.later(BACK_SECONDS, self._next_round)

    def _next_round(self) -> None:
        self.round += 1
        self.say(wire.RendezvousBegin(round=self.round, store=self._store()))

    def kill(self) -> None:
        """End the agent without a message."""
        self.dead = True
        self.flap()

    def flap(self) -> None:
        """Abort the connection without a message; an agent that lives returns."""
        if self.link is not None:
            self.link.close()


class Client:
    """A process with many agents.

    Args:
        port: of the coordinator.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.agents: dict[str, Agent] = {}
        """By place; the agent at a place changes."""
        self.received: Counter[str] = Counter()
        """Bytes of messages received, by kind."""
        self.notes: Counter[str] = Counter()
        self.connected = 0.0
        """Time of the last registration."""
        self._seen: dict[tuple[str, int], dict[str, Any]] = {}
        self._settled: dict[str, dict[str, Any]] = {}
        self._epochs: dict[tuple[str, int], wire.Epoch] = {}
        self._payloads: dict[bytes, tuple[int, wire.Epoch]] = {}
        self._names: dict[tuple[str, int], frozenset[str]] = {}
        self._pending: set[asyncio.Task[None]] = set()

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(seconds, what)

    def start(self, work: Any) -> None:
        """Run a coroutine."""
        task = asyncio.create_task(work)
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    def derive(self, task: str, payload: bytes, held: int) -> wire.Epoch | None:
        """Return the epoch that a message describes to an agent whose newest one is ``held``.

        The agents of this process share the result: on real machines each derives it on its own, at the same time.
        """
        if (known := self._payloads.get(payload)) is not None and known[0] in (0, held):
            return known[1]
        message = wire.decode_to_agent(payload)
        base = 0
        if isinstance(message, wire.EpochChange):
            base = message.base
            if base != held:
                return None
            message = changed(self._epochs[task, base], message)
        assert isinstance(message, wire.Epoch)
        self._epochs[task, message.number] = message
        self._payloads[payload] = (base, message)
        for old in (self._payloads, self._epochs, self._names):
            while len(old) > 2 * len(self.agents):
                old.pop(next(iter(old)))
        return message

    def members(self, task: str, epoch: wire.Epoch) -> frozenset[str]:
        """Workers of an epoch."""
        if (task, epoch.number) not in self._names:
            self._names[task, epoch.number] = frozenset(member.worker for member in epoch.members)
        return self._names[task, epoch.number]

    def arrived(self, task: str, epoch: int, kind: str, now: float) -> None:
        """Count an agent that has received the whole message of an epoch."""
        seen = self._seen.setdefault((task, epoch), {"kind": kind, "count": 0, "last": 0.0, "told": 0})
        seen["count"] += 1
        seen["last"] = now

    def settled(self, agent: Agent, epoch: int, now: float) -> None:
        """Count a member that may continue in an epoch."""
        found = self._settled.setdefault(agent.task, {"epoch": 0, "count": 0, "last": 0.0})
        if epoch > found["epoch"]:
            found.update(epoch=epoch, count=0)
        if epoch == found["epoch"] == agent.epoch and agent.gone < epoch:  # it may be sent again
            agent.gone = epoch
            found["count"] += 1
            found["last"] = now

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=1 << 24)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        beat, tell = asyncio.create_task(self._beat()), asyncio.create_task(self._tell())
        while line := await reader.readline():
            order = json.loads(line)
            if order["do"] == "start":
                self.start(self._start(order["agents"]))
                continue
            chosen = [self.agents[place] for place in order["places"]]
            print(json.dumps({"struck": order["places"][0], "at": time.monotonic()}), flush=True)
            for agent in chosen:
                if order["do"] == "die":
                    agent.die()
                elif order["do"] == "flap":
                    agent.flap()
                else:
                    self._replace(agent)
        beat.cancel(), tell.cancel()

    async def _start(self, agents: list[list[Any]]) -> None:
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(agent: Agent) -> None:
            async with gate:
                await agent.connect()
                for _ in range(200):
                    if agent.link is not None:
                        return
                    await asyncio.sleep(0.02)

        for place, task, low, high in agents:
            self.agents[place] = Agent(self, f"{place}.0", task, (low, high))
        await asyncio.gather(*map(one, list(self.agents.values())))

    def _replace(self, agent: Agent) -> None:
        """Kill an agent; another one takes its place after `BACK_SECONDS`."""
        agent.kill()
        place, _, number = agent.name.rpartition(".")
        other = self.agents[place] = Agent(self, f"{place}.{int(number) + 1}", agent.task, agent.nodes)
        self.later(BACK_SECONDS, lambda: self.start(other.connect()))

    async def _beat(self) -> None:
        """Send every worker's progress once a second, spread over the second."""
        while True:
            agents = list(self.agents.values())
            began = time.monotonic()
            for place in range(20):
                for agent in agents[place::20]:
                    agent.progress()
                await asyncio.sleep(max(0.0, began + (place + 1) / 20 - time.monotonic()))

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            now = time.monotonic()
            for (task, epoch), seen in self._seen.items():
                if seen["told"] < seen["count"] and now - seen["last"] > QUIET_SECONDS:
                    seen["told"] = seen["count"]
                    about = {"task": task, "epoch": epoch, "kind": seen["kind"]}
                    print(json.dumps({**about, "count": seen["count"], "last": seen["last"]}), flush=True)
            there = sum(agent.link is not None and agent.registered for agent in self.agents.values())
            told = {"settled": self._settled, "received": self.received, "notes": self.notes}
            print(json.dumps({**told, "links": {"open": there, "last": self.connected}}), flush=True)


if __name__ == "__main__":
    asyncio.run(Client(int(sys.argv[1])).run())
