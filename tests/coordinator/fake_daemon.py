"""Fake daemon for the fake cluster of `driver`: it starts ordered jobs at once."""

from __future__ import annotations

from typing import Any

from coordinator.driver import World

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev
from unicron_lightning.jobs import Job
from unicron_lightning.wire.daemon import Launch, NodeHello, NodeReport, NodeTask, decode_to_node


class FakeDaemon:
    """One node's daemon. ``runs`` is the set of jobs that it reports."""

    def __init__(
        self, world: World, node: str, *slots: str, pid: int = 1, started_at: float = 1.0, kind: str | None = None
    ) -> None:
        self.world = world
        self.node = node
        self.slots = list(slots)
        self.pid = pid
        self.started_at = started_at
        self.kind = kind
        self.conn: int | None = None
        self.launches: list[Launch] = []
        self.told = 0
        self.pids = 1000
        """The newest process of its agents."""
        self.refused: str | None = None
        self.runs: dict[tuple[str, str], NodeTask] = {}

    def connect(self) -> FakeDaemon:
        """Open a connection, and send the first message."""
        self.world.conns += 1
        self.conn = self.world.conns
        self.world.daemons[self.conn] = self
        hello = NodeHello(
            protocol=wire.PROTOCOL_VERSION,
            node=self.node,
            host="h",
            pid=self.pid,
            started_at=self.started_at,
            slots=self.slots,
            tasks=list(self.runs.values()),
            kind=self.kind,
        )
        self.world.do(ev.DaemonMessage(conn=self.conn, message=hello))
        return self

    def receive(self, message: Any) -> None:
        message = decode_to_node(wire.encode(message))
        if isinstance(message, wire.Refused):
            self.refused = message.reason
            return
        self.launches = message.launches
        self.told += 1

    @property
    def wanted(self) -> list[tuple[str, str]]:
        """Return job and slot of every agent that it is ordered to run."""
        return sorted((launch.job.name, launch.slot) for launch in self.launches)

    def obey(self) -> None:
        """Start and stop jobs as ordered, and report."""
        wanted = {(each.job.name, each.slot): each for each in self.launches}
        for key in self.runs.keys() - wanted.keys():
            del self.runs[key]
        for key in wanted.keys() - self.runs.keys():
            self.pids += 1
            self.runs[key] = NodeTask(job=wanted[key].job, slot=key[1], pid=self.pids, starts=1)
        self.tell()

    def ends(self, job: str, slot: str, code: int) -> None:
        """End a torchrun agent by itself."""
        old = self.runs[job, slot]
        self.runs[job, slot] = NodeTask(job=old.job, slot=slot, starts=old.starts, code=code)
        self.tell()

    def tell(self) -> None:
        self.say(NodeReport(tasks=list(self.runs.values())))

    def say(self, message: Any) -> None:
        assert self.conn is not None
        self.world.do(ev.DaemonMessage(conn=self.conn, message=message))

    def drop(self) -> None:
        """Break the connection."""
        assert self.conn is not None
        conn, self.conn = self.conn, None
        del self.world.daemons[conn]
        self.world.do(ev.Disconnected(conn=conn))


def job(name: str, *, nodes: tuple[int, int] = (1, 1), **fields: Any) -> Job:
    return Job(name=name, command=["train.py"], min_nodes=nodes[0], max_nodes=nodes[1], **fields)
