"""Simulated agents' sessions: a client process of `agents`, kept small because it shares the coordinator's cores.

Orders arrive as JSON lines on stdin; observations are written to stdout in the same form.
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
from unicron_lightning.proof import Meeting, authorization, new_nonce
from unicron_lightning.wire.epoch_changes import changed

QUIET_SECONDS = 0.3
"""Time without a further arrival after which a client reports an epoch."""
BACK_SECONDS = 2.0
"""Delay between the end of a worker, or agent, and the start of its replacement."""
HANDSHAKE = (
    "GET /v1/agent HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
    "Authorization: {authorization}\r\n\r\n"
)


class Agent(asyncio.Protocol):
    """One agent with one worker.

    Args:
        client: notified of epochs.
        name: the agent's id.
        task: the agent's task.
        nodes: least and most nodes of the task.
    """

    def __init__(self, client: Client, name: str, task: str, nodes: tuple[int, int]) -> None:
        self.client, self.name, self.task, self.nodes = client, name, task, nodes
        self.round, self.step, self.epoch = 0, 0, 0
        self.closed = False
        self._founder = True
        self._kind = ""
        self._buffer = bytearray()
        self._open = False
        self._nonce = new_nonce()
        self._transport: asyncio.Transport | None = None

    @property
    def worker(self) -> str:
        return f"{self.name}/0#{self.round}"

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport.write(f"GET /v1/challenge?nonce={self._nonce} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed:
            print(f"{self.name} lost its connection: {exc}", file=sys.stderr)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._nonce and not self._challenged():
            return
        if not self._open:
            head = self._buffer.find(b"\r\n\r\n")
            if head < 0:
                return
            assert self._buffer.startswith(b"HTTP/1.1 101"), bytes(self._buffer[:200])
            del self._buffer[: head + 4]
            self._open = True
            self._register()
        for kind, payload in self._frames():
            if kind == 1:
                self._hear(payload)
            elif kind == 9:
                self._write(10, payload)

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
        head = bytes([0x80 | kind]) + length
        assert self._transport is not None
        self._transport.write(head + bytes(4) + payload)  # masked with zeros, which leaves the payload unchanged

    def say(self, message: wire.FromAgent) -> None:
        self._write(1, wire.encode(message))

    def _register(self) -> None:
        self.round += 1
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
                waiting=True,
                granted=False,
                store=self._store(),
                local_world=None,
                workers=[],
                epoch=0,
            )
        )

    def _store(self) -> wire.Address:
        # nothing listens there, and only a refusal after a successful connection is evidence of death
        return wire.Address(host="127.0.0.1", port=20_000 + self.round)

    def _hear(self, payload: bytes) -> None:
        now = time.monotonic()
        name = payload[9 : payload.index(b'"', 9)]
        self.client.received[name.decode()] += len(payload)
        if name in (b"epoch", b"epoch_change"):
            epoch = self.client.derive(self.task, payload, self.epoch)
            if epoch is None:
                self.say(wire.EpochWanted(epoch=self.epoch))
                return
            self.epoch, self._kind = epoch.number, epoch.kind
            self.client.arrived(self.task, self.epoch, self._kind, now)
            if self.worker in self.client.members(self.task, epoch):  # else this worker has left
                self._ready(self.epoch)
        elif name == b"grant":
            self.say(wire.LocalWorld(round=self.round, size=1))
            self.say(wire.WorkerHello(worker=self.worker, local_rank=0, pid=os.getpid(), capacity=100_000))
        elif name == b"welcome":
            self._founder = wire.decode_to_agent(payload).founder  # type: ignore[union-attr]
            self._ready(0)
        elif name == b"go":
            self.client.settled(self.task, int(payload[payload.index(b'"epoch":') + 8 :].split(b",")[0]))
            self._first_step()
        elif name in (b"refused", b"fence", b"stop", b"task_over"):
            print(f"{self.name} received {payload[:200]!r}", file=sys.stderr)

    def _ready(self, epoch: int) -> None:
        # The state has the size of a real worker's.
        state = {"position": self.step, "step": self.step, "has_state": epoch > 0, "operation": "step"}
        report = {"finished": [0, 1, 2], "reduced": [0, 1, 2, 3]}
        about = {**state, "report": report} if epoch else {**state, "founder": self._founder}
        self.say(wire.WorkerReady(worker=self.worker, epoch=epoch, state=about))

    def _first_step(self) -> None:
        name = {"fail": "recovered", "join": "grown", "leave": "shrunk"}.get(self._kind, "started")
        self.step = max(self.step, self.client.step(self.task))
        fields = {"epoch": self.epoch, "step": self.step, "world": 0, "recomputed": 0}
        self.say(wire.WorkerEvent(worker=self.worker, name=name, at=time.time(), fields=fields))

    def progress(self) -> None:
        """Send the progress report that a worker's control thread sends once a second."""
        if self.epoch and not self.closed:
            self.step = self.client.step(self.task)
            self.say(wire.Progress(worker=self.worker, step=self.step, metrics={"loss": 1.25}, at=time.time()))

    def die(self) -> None:
        """Report the worker's death; torchrun starts another one after `BACK_SECONDS`."""
        self.say(wire.WorkerDied(worker=self.worker, cause="signal", code=9, at=time.time()))
        self.epoch = 0
        self.client.later(BACK_SECONDS, self._again)

    def _again(self) -> None:
        self.round += 1
        self.say(wire.RendezvousBegin(round=self.round, store=self._store()))

    def close(self) -> None:
        """Abort the connection without a message."""
        self.closed = True
        assert self._transport is not None
        self._transport.abort()


class Client:
    """A process with many agents."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.agents: dict[str, Agent] = {}
        self._seen: dict[tuple[str, int], dict[str, Any]] = {}
        self._settled: dict[str, int] = {}
        self._epochs: dict[tuple[str, int], wire.Epoch] = {}
        self._payloads: dict[bytes, tuple[int, wire.Epoch]] = {}
        self._names: dict[tuple[str, int], frozenset[str]] = {}
        self.received: Counter[str] = Counter()
        """Bytes of messages received, by kind."""
        self._pending: set[asyncio.Task[None]] = set()

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(seconds, what)

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

    def step(self, task: str) -> int:
        """Step of all members of a task: steps take one second by the shared clock."""
        return int(time.time())

    def arrived(self, task: str, epoch: int, kind: str, now: float) -> None:
        """Count an agent that has received the whole message of an epoch."""
        seen = self._seen.setdefault((task, epoch), {"kind": kind, "count": 0, "last": 0.0, "told": 0})
        seen["count"] += 1
        seen["last"] = now

    def settled(self, task: str, epoch: int) -> None:
        self._settled[task] = max(epoch, self._settled.get(task, 0))

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=1 << 24)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        beat, tell = asyncio.create_task(self._beat()), asyncio.create_task(self._tell())
        while line := await reader.readline():
            order = json.loads(line)
            if order["do"] == "start":
                for name, task, nodes in order["agents"]:
                    await self._start(name, task, nodes)
            else:
                agent = self.agents[order["agent"]]
                print(json.dumps({"struck": order["agent"], "at": time.monotonic()}), flush=True)
                agent.die() if order["do"] == "die" else self._replace(agent)
        beat.cancel(), tell.cancel()

    async def _start(self, name: str, task: str, nodes: list[int]) -> None:
        agent = self.agents[name] = Agent(self, name, task, (nodes[0], nodes[1]))
        await asyncio.get_running_loop().create_connection(lambda: agent, "127.0.0.1", self._port)

    def _replace(self, agent: Agent) -> None:
        agent.close()

        async def other() -> None:
            await asyncio.sleep(BACK_SECONDS)
            await self._start(agent.name, agent.task, list(agent.nodes))

        agent_name, number = agent.name.rpartition(".")[::2]
        agent.name = f"{agent_name}.{int(number) + 1}"
        waits = asyncio.create_task(other())
        self._pending.add(waits)
        waits.add_done_callback(self._pending.discard)

    async def _beat(self) -> None:
        """Send every worker's progress once a second, spread over the second."""
        while True:
            names = list(self.agents)
            for place in range(20):
                for name in names[place::20]:
                    self.agents[name].progress()
                await asyncio.sleep(0.05)

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            now = time.monotonic()
            for (task, epoch), seen in self._seen.items():
                if seen["told"] < seen["count"] and now - seen["last"] > QUIET_SECONDS:
                    seen["told"] = seen["count"]
                    about = {"task": task, "epoch": epoch, "kind": seen["kind"]}
                    print(json.dumps({**about, "count": seen["count"], "last": seen["last"]}), flush=True)
            print(json.dumps({"settled": self._settled, "received": self.received}), flush=True)


if __name__ == "__main__":
    asyncio.run(Client(int(sys.argv[1])).run())
