"""A whole task on a virtual clock: real engines, steps, controls, rosters, outboxes and the coordinator's machine.

Only one thread runs at a time. Between any two of its actions a seeded generator chooses the next event: a message is
delivered on one of the links, a collective completes or breaks for one rank, a timer fires, a process is killed, a
connection is cut, or the coordinator restarts. One seed is one history.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from worker.history_agent import SimAgent
from worker.history_data import Hubs
from worker.history_worker import SimWorker

from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator import state
from unicron_lightning.coordinator.machine import Machine

MOST_EVENTS = 30_000
"""More, and a history is taken for one that never ends."""


class Link:
    """Messages one way, in order."""

    def __init__(self, receive: Callable[[Any], None]) -> None:
        self.queue: deque[Any] = deque()
        self._receive = receive

    def deliver(self) -> None:
        self._receive(self.queue.popleft())


class Stuck(AssertionError):
    """Nothing can happen any more, and the task is not over."""


class History:
    """One history.

    Args:
        seed: of all choices.
        agents: to begin with.
        steps: until a worker has finished.
        faults: how many strike.
        minimum: of nodes.
        patient: timers fire only when nothing else can happen, and no agent is lost: no survivor may be declared dead.
    """

    def __init__(
        self, seed: int, *, agents: int = 3, steps: int = 3, faults: int = 2, minimum: int = 1, patient: bool = False
    ) -> None:
        self.random = random.Random(seed)
        self.steps = steps
        self.minimum = minimum
        self.patient = patient
        self.now = 1000.0
        self.events = 0
        self.baton = threading.Semaphore(0)
        self.links: list[Link] = []
        self.hubs = Hubs(self)
        self.workers: dict[str, SimWorker] = {}
        self.agents: list[SimAgent] = []
        self.made = 0
        self.conns: dict[int, SimAgent] = {}
        self.connections = 0
        self.disk: dict[str, bytes] = {}
        self.lasting = b""
        self.log: list[tuple[Any, ...]] = []
        self.over: bool | None = None
        self.struck: list[tuple[int, str]] = []
        self.finished: dict[tuple[int, int, int], list[tuple[str, int]]] = {}
        self.violations: list[str] = []
        self._plan = sorted((self.random.randrange(40, 150 + 130 * steps), self._draw()) for _ in range(faults))
        self._start_coordinator()
        for _ in range(agents):
            self.add_agent()

    # ---- what happens

    def run(self) -> None:
        """Until all workers that live have finished."""
        try:
            while not self._is_over():
                self.events += 1
                assert self.events < MOST_EVENTS, "a history without an end"
                if self._plan and self._plan[0][0] <= self.events:
                    self._strike(self._plan.pop(0)[1])
                else:
                    self._next()
        finally:
            for worker in list(self.workers.values()):
                worker.end("history over")

    def _next(self) -> None:
        choices: list[Callable[[], None]] = [link.deliver for link in self.links if link.queue]
        choices += [worker.resume for worker in self.workers.values() if worker.runnable()]
        choices += self.hubs.choices()
        for agent in self.agents:
            choices += agent.choices()
        if self.timers and (not choices or (not self.patient and self.random.random() < 0.004)):
            self._fire()
            return
        if not choices:
            present = [agent for agent in self.agents if not agent.over]
            if len(present) >= self.minimum:
                raise Stuck("nothing can happen any more")
            self.over = False  # the others have finished, or were lost: it waits for nodes
            return
        self.random.choice(choices)()

    def _is_over(self) -> bool:
        return self.over is not None or (
            not self._plan and bool(self.workers) and all(w.done for w in self.workers.values())
        )

    # ---- faults

    def _draw(self) -> str:
        kinds = ["kill", "kill", "kill", "kill", "two", "restart", "cut", "add", "socket"]
        return self.random.choice(kinds if self.patient else [*kinds, "agent", "forget", "lost"])

    def _strike(self, kind: str) -> None:
        live = [worker for worker in self.workers.values() if worker.alive and not worker.done]
        connected = [agent for agent in self.agents if agent.conn is not None]
        self.note("fault", kind)
        match kind:
            case "kill" | "two" if live:
                for victim in self.random.sample(live, min(len(live), 2 if kind == "two" else 1)):
                    victim.die("killed")
            case "agent" if len(self.agents) > 1:
                self.random.choice(self.agents).die()
                self.add_agent()
            case "restart" | "forget":
                if kind == "forget":
                    self.disk.clear()
                    self.lasting = b""
                self._start_coordinator()
            case "cut" if connected:
                self.random.choice(connected).cut()
            case "lost" if connected:  # declared lost by mistake: it cannot come back before its grace is over
                agent = self.random.choice(connected)
                agent.cut()
                self.now += 1.0
                while any(key.kind == "lost" for key in self.timers):
                    self._fire()
            case "add" if len(self.agents) < 5:
                self.add_agent()
            case "socket":
                self.hubs.break_one()

    # ---- the coordinator

    def _start_coordinator(self) -> None:
        for agent in list(self.conns.values()):
            agent.disconnected()
        self.conns.clear()
        tasks = {task: state.decode_task(blob) for task, blob in self.disk.items()}
        lasting = state.decode_lasting(self.lasting) if self.lasting else state.Lasting()
        self.machine = Machine(ev.Limits(secret=b"s"), state.Cluster(tasks=tasks, lasting=lasting))
        self.timers: dict[ev.TimerKey, float] = {}
        self.do(ev.Started())

    def do(self, event: ev.Input) -> None:
        """Give the machine an input, and carry out its actions."""
        for action in self.machine.handle(event, self.now):
            self._carry_out(action)

    def _carry_out(self, action: ev.Action) -> None:
        match action:
            case ev.Send(conn=conn, message=message):
                if (agent := self.conns.get(conn)) is not None:
                    agent.down.queue.append(message)
            case ev.Close(conn=conn):
                if (agent := self.conns.pop(conn, None)) is not None:
                    agent.disconnected()
            case ev.SetTimer(key=key, seconds=seconds):
                self.timers[key] = self.now + seconds
            case ev.CancelTimer(key=key):
                self.timers.pop(key, None)
            case ev.Save(task=task) if task in self.machine.tasks:
                self.disk[task] = state.encode(self.machine.tasks[task])
            case ev.Save(task=task) | ev.Forget(task=task):
                self.disk.pop(task, None)
            case ev.SaveLasting():
                self.lasting = state.encode(self.machine.lasting)
            case ev.Emit(name="task_over"):
                self.over = bool(action.fields["succeeded"])
            case ev.Emit():
                self.note("event", action.name, action.fields)

    def _fire(self) -> None:
        key = min(self.timers, key=lambda each: (self.timers[each], each))
        self.now = max(self.now, self.timers.pop(key))
        self.note("timer", key.kind, key.agent)
        self.do(ev.TimerFired(key=key))

    # ---- parts

    def add_agent(self) -> None:
        """Another torchrun."""
        self.made += 1
        self.agents.append(SimAgent(self, f"n{self.made}"))

    def link(self, receive: Callable[[Any], None]) -> Link:
        """A new link."""
        link = Link(receive)
        self.links.append(link)
        return link

    def note(self, *words: Any) -> None:
        """Keep a line of what happened."""
        self.log.append((self.events, *words))

    # ---- what must hold

    def computed(self, worker: SimWorker, place: tuple[int, int, int]) -> None:
        """A worker has finished a micro-batch (life, step, number): no member of its world may have finished it."""
        epoch = worker.engine.world.epoch
        self.note("computed", worker.name, place, epoch)
        members = {member.worker for member in worker.members()}
        for other, when in self.finished.setdefault(place, []):
            known = self.workers.get(other)
            if other == worker.name or (known is not None and known.alive and other in members):
                self.violations.append(
                    f"{worker.name} computed {place} in epoch {epoch}; {other} had finished it in epoch {when}"
                )
        self.finished[place].append((worker.name, epoch))
