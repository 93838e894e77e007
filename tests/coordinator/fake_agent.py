"""Agent with its workers for tests of the state machine: it sends the messages that the test chooses."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev

if TYPE_CHECKING:
    from coordinator.driver import World

M = TypeVar("M", bound=wire.Message)


class FakeAgent:
    """One agent and its workers, controlled by the test, with the state that a real agent reports at registration."""

    def __init__(self, world: World, name: str, task: str, nodes: tuple[int, int], size: int) -> None:
        self.world = world
        self.name = name
        self.node = f"node-{name}"
        self.slot: str | None = None
        self.rack: str | None = None
        self.task = task
        self.nodes = nodes
        self.size = size
        self.conn: int | None = None
        self.round = 0
        self.waiting = False
        self.granted = False
        self.warm = False
        self.stopped = False
        self.local_world: int | None = None
        self.without_ranks = False
        self.granularity: int | None = None
        self.workers: dict[str, wire.WorkerInfo] = {}
        self.epoch = 0
        self.newest: wire.Epoch | None = None
        self.inbox: list[wire.ToAgent] = []
        self.outbox: list[wire.FromAgent] = []

    def receive(self, message: wire.ToAgent) -> None:
        self.inbox.append(message)
        self.stopped = self.stopped or isinstance(message, wire.Stop)
        match message:
            case wire.Grant() if message.round == self.round and (self.waiting or self.warm):
                self.waiting, self.granted, self.warm = False, not message.warm, message.warm
            case wire.Ranks() if message.round == self.round:
                self.without_ranks = False
            case wire.Epoch():
                self.epoch, self.newest = max(self.epoch, message.number), message
            case wire.Probe():
                self.world.probes.append((self, message))
            case wire.Fence():
                self.workers.pop(message.worker, None)
            case wire.Welcome() if not message.founder and (info := self.workers.get(message.worker)) is not None:
                # the first epoch was formed without it: it prepares as a joiner, and reports when it is ready
                if info.ready is not None and info.ready.epoch == 0:
                    self.workers[message.worker] = msgspec.structs.replace(info, ready=None)

    def all(self, kind: type[M]) -> list[M]:
        return [message for message in self.inbox if isinstance(message, kind)]

    def last(self, kind: type[M]) -> M:
        return self.all(kind)[-1]

    def worker(self, local_rank: int = 0) -> str:
        return f"{self.name}/{local_rank}#{self.round}"

    @property
    def store(self) -> wire.Address:
        return wire.Address(host=self.name, port=1000 + self.round)

    def registration(self) -> wire.Register:
        return wire.Register(
            protocol=wire.PROTOCOL_VERSION,
            task=self.task,
            agent=self.name,
            node=self.node,
            slot=self.slot,
            rack=self.rack,
            host="127.0.0.1",
            pid=1,
            min_nodes=self.nodes[0],
            max_nodes=self.nodes[1],
            round=self.round,
            waiting=self.waiting,
            granted=self.granted,
            store=self.store if self.round else None,
            local_world=self.local_world,
            workers=list(self.workers.values()),
            epoch=self.epoch,
            warm=self.warm,
            secret=self.name.encode().hex()[:32],
        )

    def register(self, *, excused: bool = False, **changes: Any) -> FakeAgent:
        self.world.conns += 1
        self.conn = self.world.conns
        self.world.agents[self.conn] = self
        message = wire.Register(**{**_fields(self.registration()), **changes})
        self.world.do(ev.AgentMessage(conn=self.conn, message=message, excused=excused))
        kept, self.outbox = self.outbox, []
        for message in kept:
            if self.conn is not None:
                self.say(message)
        return self

    def say(self, message: wire.FromAgent) -> None:
        """Send a message, or keep it until the agent registers again."""
        if self.conn is None:
            self.outbox.append(message)
            return
        self.world.do(ev.AgentMessage(conn=self.conn, message=message))

    def drain(self, drained: bool = True) -> FakeAgent:
        """Drain this agent's node, or undrain it, as an operator."""
        self.world.do(ev.Drain(node=self.node, drained=drained))
        return self

    def rendezvous(self) -> FakeAgent:
        self.round += 1
        self.waiting, self.granted, self.local_world, self.workers = True, False, None, {}
        self.warm = self.stopped = self.without_ranks = False
        if self.conn is not None:
            self.say(wire.RendezvousBegin(round=self.round, store=self.store))
        return self

    def start(self) -> FakeAgent:
        """Register and rendezvous for the first time."""
        return self.register().rendezvous()

    def launch(self) -> FakeAgent:
        """Start the workers of the granted round, as torchrun does."""
        assert self.granted or self.warm
        self.local_world, self.without_ranks = self.size, self.granted
        self.say(wire.LocalWorld(round=self.round, size=self.size))
        for local_rank in range(self.size):
            self.workers[self.worker(local_rank)] = wire.WorkerInfo(
                worker=self.worker(local_rank), local_rank=local_rank
            )
        return self

    def hello(self, local_rank: int = 0, *, capacity: int = 8) -> Any:
        name = self.worker(local_rank)
        about = {"worker": name, "local_rank": local_rank, "pid": 7, "granularity": self.granularity}
        message = wire.WorkerHello(**about, capacity=capacity)
        self.workers[name] = wire.WorkerInfo(worker=name, local_rank=local_rank, hello=message)
        self.say(message)
        return next(reversed(self.all(wire.Welcome)), None)

    def ready(self, epoch: int, local_rank: int = 0, *, step: int = 0) -> None:
        name = self.worker(local_rank)
        state_ = {"step": step, "has_state": epoch > 0}
        message = wire.WorkerReady(worker=name, epoch=epoch, state=state_)
        old = self.workers[name]
        self.workers[name] = wire.WorkerInfo(worker=name, local_rank=local_rank, hello=old.hello, ready=message)
        if self.conn is not None:
            self.say(message)

    def warm_up(self) -> FakeAgent:
        """Launch without a slot and send hellos: all workers wait to be welcomed."""
        assert self.warm
        self.launch()
        for local_rank in range(self.size):
            self.hello(local_rank)
        return self

    def worker_goes_on(self, local_rank: int = 0, *, capacity: int = 8) -> None:
        """Have the worker send its next message, e.g. the answer to the newest epoch if it is a member."""
        info = self.workers.get(self.worker(local_rank))
        epochs = self.all(wire.Epoch)
        if info is None or self.without_ranks:  # torchrun has not started it yet
            return
        if info.hello is None:
            if self.conn is not None:
                self.hello(local_rank, capacity=capacity)
        elif not any(word.worker == info.worker for word in self.all(wire.Welcome)):
            return  # it waits
        elif info.ready is None:
            self.ready(0, local_rank)
        elif epochs and info.worker in {member.worker for member in epochs[-1].members}:
            went = any(go.epoch == epochs[-1].number for go in self.all(wire.Go))
            if epochs[-1].kind in wire.PARTING and went:
                self.saved("/ckpt", epochs[-1].number, worker=info.worker, parting=True)
            self.ready(epochs[-1].number, local_rank)

    def saved(
        self, path: str, step: int, text: str = "", *, worker: str = "", parting: bool = False, fit: int = 1
    ) -> None:
        """Report a checkpoint with a content."""
        digest = hashlib.sha256((text or path).encode()).hexdigest()
        worker = worker or self.worker()
        self.say(wire.CheckpointSaved(worker=worker, path=path, step=step, digest=digest, parting=parting, fit=fit))

    def resumes(self) -> list[str]:
        """Paths of the checkpoints in the last welcome."""
        return [checkpoint.path for checkpoint in self.last(wire.Welcome).resume]

    def boot(self, *, capacity: int = 8) -> FakeAgent:
        """Launch, send hellos, build: all workers can become members."""
        self.launch()
        for local_rank in range(self.size):
            self.hello(local_rank, capacity=capacity)
        for local_rank in range(self.size):
            self.ready(0, local_rank)
        return self

    def die(self, local_rank: int = 0, *, cause: Any = "signal", code: int = 9, **about: Any) -> None:
        name = self.worker(local_rank)
        self.workers.pop(name, None)
        self.say(wire.WorkerDied(worker=name, cause=cause, code=code, at=self.world.now, **about))

    def exit(self, local_rank: int = 0) -> None:
        self.die(local_rank, cause="exit", code=0)

    def bye(self, *, succeeded: bool) -> None:
        self.say(wire.Bye(succeeded=succeeded))

    def drop(self) -> None:
        """Break the connection."""
        assert self.conn is not None
        conn, self.conn = self.conn, None
        del self.world.agents[conn]
        self.world.do(ev.Disconnected(conn=conn))


def _fields(message: wire.Register) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__struct_fields__}
