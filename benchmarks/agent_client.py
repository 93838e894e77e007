"""Simulated agents: a client process of `agents` and `storms`, kept small, as it shares the coordinator's cores.

Orders arrive as JSON lines on stdin; observations are written to stdout in the same form. An agent behaves as a real
one: it proves the token, registers, sends beats, reports its worker's progress, answers every epoch, and returns with
the same back-off after its connection has ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from agent_link import Link, text_frame

from unicron_lightning import wire
from unicron_lightning.link import retry_delay
from unicron_lightning.wire.epoch_changes import changed

QUIET_SECONDS = 0.3
"""Time without a further arrival after which a client reports an epoch."""
BACK_SECONDS = 2.0
"""Delay between the end of a worker, or agent, and the start of its replacement."""
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 0.05, 2.0
"""As of `agent.coordinator_session`, which this process does not import, since it needs torch."""
AT_ONCE = 200
"""Agents that connect at the same time at the start."""
TICK_SECONDS = 0.05
"""Beats and progress are sent by one timer of the process."""
REPLY_SECONDS = 0.02
"""Time that workers take to answer an epoch or its go. The agents of this process share a core: without it the answers
of the first ones would delay the moment at which the last ones are served."""
BEAT = text_frame(wire.encode(wire.Beat()))


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
        self._beat_seconds = self._beat_due = self._progress_seconds = self._progress_due = 0.0

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
            self.client.open -= self.registered
            self.link, self.registered = None, False
            if not self.dead:
                self._again()

    def _again(self) -> None:
        self.client.later(retry_delay(self._retry), lambda: self.client.start(self.connect()))
        self._retry = min(2 * self._retry, LAST_RETRY_SECONDS)

    def say(self, message: wire.Message) -> None:
        if self.link is not None:
            self.link.write(text_frame(wire.encode(message)))

    def _store(self) -> wire.Address:
        # nothing listens there, and only a refusal after a successful connection is evidence of death
        return wire.Address(host="127.0.0.1", port=20_000 + self.round)

    def tick(self, now: float) -> None:
        """Send the beat and the worker's progress report if they are due."""
        if self.link is None or not self.registered:
            return
        if now >= self._beat_due:
            self._beat_due += self._beat_seconds
            self.link.write(BEAT)
        if now >= self._progress_due and self.epoch:
            self._progress_due += self._progress_seconds
            self.step = int(time.time())
            metrics: dict[str, float | None] = {"loss": 1.25}
            self.say(wire.Progress(worker=self.worker, step=self.step, metrics=metrics, at=time.time()))

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
            self.client.open += not self.registered
            self.client.connected, self.registered = now, True
            told = json.loads(payload)
            self._beat_seconds, self._progress_seconds = told["beat"], max(1.0, told["progress"])
            self._beat_due = now + retry_delay(self._beat_seconds)
            self._progress_due = now + retry_delay(self._progress_seconds)
            self.client.watch(self)
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
            self.client.reply(lambda: self._first_step(go))
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
            self.client.reply(lambda: self._ready(epoch.number))

    def _ready(self, epoch: int) -> None:
        # The state has the size of a real worker's.
        if epoch and (self.dead or epoch != self.epoch):  # another one came while it answered
            return
        state = {"position": self.step, "step": self.step, "has_state": epoch > 0, "operation": "step"}
        report = {"finished": [0, 1, 2], "reduced": [0, 1, 2, 3]}
        about = {**state, "report": report} if epoch else {**state, "founder": self._founder}
        self._last = wire.WorkerReady(worker=self.worker, epoch=epoch, state=about)
        self.say(self._last)

    def _first_step(self, epoch: int) -> None:
        entered = {"epoch": epoch, "kind": self._kind, "rank": 0, "world": 0, "step": self.step, "wait_ms": 1.0}
        self.say(wire.WorkerEvent(worker=self.worker, name="entered_epoch", at=time.time(), fields=entered))
        name = {"fail": "recovered", "join": "grown", "leave": "shrunk"}.get(self._kind, "started")
        self.step = max(self.step, int(time.time()))
        fields = {"epoch": epoch, "step": self.step, "world": 0, "recomputed": []}
        self.say(wire.WorkerEvent(worker=self.worker, name=name, at=time.time(), fields=fields))

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
        self.open = 0
        """Registered agents with a connection."""
        self._answers: list[Callable[[], None]] = []
        self._wheel: list[dict[str, Agent]] = [{} for _ in range(5)]
        """Agents that send beats, by name, in parts that are looked at one after the other."""
        self._seen: dict[tuple[str, int], dict[str, Any]] = {}
        self._settled: dict[str, dict[str, Any]] = {}
        self._epochs: dict[tuple[str, int], wire.Epoch] = {}
        self._payloads: dict[bytes, tuple[int, wire.Epoch]] = {}
        self._names: dict[tuple[str, int], frozenset[str]] = {}
        self._pending: set[asyncio.Task[None]] = set()

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(seconds, what)

    def reply(self, answer: Callable[[], None]) -> None:
        """Have an answer sent after `REPLY_SECONDS`, with others that are due then."""
        if not self._answers:
            self.later(REPLY_SECONDS, self._reply)
        self._answers.append(answer)

    def _reply(self) -> None:
        due, self._answers = self._answers, []
        for answer in due:
            answer()

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

    def watch(self, agent: Agent) -> None:
        """Send an agent's beats and progress from now on."""
        self._wheel[hash(agent.name) % len(self._wheel)][agent.name] = agent

    async def _beat(self) -> None:
        """Send the beats and progress reports that are due."""
        while True:
            for part in self._wheel:
                now = time.monotonic()
                for agent in list(part.values()):
                    if agent.dead:
                        del part[agent.name]
                    else:
                        agent.tick(now)
                await asyncio.sleep(TICK_SECONDS - (time.monotonic() - now))

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            now = time.monotonic()
            for (task, epoch), seen in self._seen.items():
                if seen["told"] < seen["count"] and now - seen["last"] > QUIET_SECONDS:
                    seen["told"] = seen["count"]
                    about = {"task": task, "epoch": epoch, "kind": seen["kind"]}
                    print(json.dumps({**about, "count": seen["count"], "last": seen["last"]}), flush=True)
            told = {"settled": self._settled, "received": self.received, "notes": self.notes}
            print(json.dumps({**told, "links": {"open": self.open, "last": self.connected}}), flush=True)


if __name__ == "__main__":
    asyncio.run(Client(int(sys.argv[1])).run())
