"""One agent of a history: real `Roster` and `Outbox`, and around them what `AgentThread` does with each message."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from worker.history_worker import SimWorker

from unicron_lightning import environ, wire
from unicron_lightning.agent.coordinator_session import Outbox
from unicron_lightning.agent.workers.roster import Roster
from unicron_lightning.coordinator import events as ev

if TYPE_CHECKING:
    from worker.history import History


class SimAgent:
    """One torchrun with one worker at a time."""

    def __init__(self, history: History, name: str) -> None:
        self.history, self.name = history, name
        self.alive = True
        self.roster, self.outbox = Roster(), Outbox()
        self.round = 0
        self.grant: wire.Grant | None = None
        self.local_world: int | None = None
        self.stop = False
        self.over = self.said_bye = False
        self.conn: int | None = None
        self.stands = False
        self.worker: SimWorker | None = None
        self.unread: SimWorker | None = None
        """Its worker's end has not been noticed yet."""
        self.up = history.link(self._to_coordinator)
        self.down = history.link(self._from_coordinator)
        self._begin_round()

    # ---- what can happen here

    def choices(self) -> list[Callable[[], None]]:
        """What this agent may do next."""
        if not self.alive:
            return []
        choices: list[Callable[[], None]] = []
        worker = self.worker
        if self.conn is None and not self.said_bye and (not self.over or len(self.outbox)):
            choices.append(self._connect)
        if self.stands and len(self.outbox):
            choices.append(self._write)
        if worker is not None and worker.exit is not None:
            choices.append(self._notice_end)
        elif self.stop and worker is not None:
            choices.append(lambda: worker.die("stopped", signal.SIGTERM))
        elif worker is None and self.grant is not None and self.local_world is None and not self.over:
            choices.append(self._launch)
        elif worker is None and (self.stop or self.local_world is not None) and not self.over:
            choices.append(self._begin_round)
        return choices

    def die(self) -> None:
        """SIGKILL: its worker dies with it."""
        self.history.note("agent dies", self.name)
        self.alive = False
        if self.worker is not None:
            self.worker.die("its agent died")
        self.cut()
        self.history.agents.remove(self)

    def cut(self) -> None:
        """The connection breaks, and with it what is on its way."""
        conn = self.conn
        if conn is None:
            return
        self.history.conns.pop(conn, None)
        self.disconnected()
        self.history.do(ev.Disconnected(conn=conn))

    def disconnected(self) -> None:
        """[also by the coordinator] The connection is gone."""
        self.conn, self.stands = None, False
        self.up.queue.clear()
        self.down.queue.clear()
        self.outbox.closed(self.history.now)

    # ---- the coordinator's link

    def _connect(self) -> None:
        history = self.history
        history.connections += 1
        self.conn = history.connections
        history.conns[self.conn] = self
        self.outbox.opened()
        for lookup in self.roster.unanswered():
            self.outbox.put(lookup)
        self.up.queue.append(self._registration())

    def _registration(self) -> wire.Register:
        return wire.Register(
            protocol=wire.PROTOCOL_VERSION,
            task="t",
            agent=self.name,
            node=f"node-{self.name}",
            host="127.0.0.1",
            pid=1,
            min_nodes=self.history.minimum,
            max_nodes=4,
            round=self.round,
            waiting=self.grant is None,
            granted=self.grant is not None,
            store=wire.Address(host=self.name, port=1000 + self.round),
            local_world=self.local_world,
            workers=self.roster.infos(),
            epoch=self.roster.epoch,
            warm=False,
            secret=self.name.encode().hex().ljust(32, "0"),
        )

    def _write(self) -> None:
        message = self.outbox.take(self.history.now)
        if message is not None:
            self.up.queue.append(message)
            self.said_bye |= isinstance(message, wire.Bye)

    def _to_coordinator(self, message: Any) -> None:
        if self.conn is not None:
            self.history.do(ev.AgentMessage(conn=self.conn, message=message))

    def _from_coordinator(self, message: Any) -> None:
        worker = self.worker
        match message:
            case wire.Registered():
                self.stands = True
            case wire.Grant() if message.round == self.round and self.grant is None:
                self.grant = message
            case wire.Stop():
                self.stop = self.stop or self.grant is not None
            case wire.Fence() if worker is not None and worker.name == message.worker:
                worker.die("fenced", signal.SIGKILL)
            case wire.TaskOver():
                self.over = True
                self._tell(message)
            case wire.Refused():
                self.over = True
            case wire.Epoch() | wire.EpochChange():
                if (epoch := self.roster.whole(message)) is None:
                    self.outbox.put(wire.EpochWanted(epoch=self.roster.epoch))
                    return
                self.roster.saw_epoch(epoch)
                self._tell(epoch)
            case wire.Welcome() | wire.Go() | wire.ActivityQuery():
                self._tell(message)
            case wire.LookupReply():
                self.roster.saw_reply(message)
                self._tell(message)

    # ---- its worker

    def from_worker(self, worker: SimWorker, message: Any) -> None:
        if not self.alive:
            return
        if isinstance(message, wire.WorkerHello):
            self.roster.add(worker.name, 0)
        if worker.name not in self.roster:
            return
        self.roster.heard(worker.name, message, self.history.now)
        self.outbox.put(message)

    def _tell(self, message: wire.ToWorker) -> None:
        if self.worker is not None and self.worker.exit is None:
            self.worker.down.queue.append(message)

    def _begin_round(self) -> None:
        self.round += 1
        self.grant, self.local_world, self.stop, self.worker = None, None, False, None
        store = wire.Address(host=self.name, port=1000 + self.round)
        self.outbox.put(wire.RendezvousBegin(round=self.round, store=store))

    def _launch(self) -> None:
        self.local_world = 1
        self.outbox.put(wire.LocalWorld(round=self.round, size=1))
        name = environ.worker_id(self.name, 0, self.round)
        self.roster.add(name, 0)
        self.worker = SimWorker(self.history, self, name)
        self.history.workers[name] = self.worker

    def _notice_end(self) -> None:
        """The pidfd: what the worker said last may lie unread."""
        worker, self.worker = self.worker, None
        assert worker is not None and worker.exit is not None
        if self.roster.remove(worker.name) is not None:
            cause: Any = "exit" if worker.exit in (0, 1, 75, 76) else "signal"
            self.outbox.put(
                wire.WorkerDied(worker=worker.name, cause=cause, code=worker.exit, at=self.history.now, meaning="")
            )
        if worker.exit == 0:  # torchelastic ends, too
            self.over = True
            self.outbox.put(wire.Bye(succeeded=True))
