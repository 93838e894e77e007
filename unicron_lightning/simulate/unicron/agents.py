"""A place's daemon and its agents, as the coordinator sees them: their messages and timing.

One simulated worker represents all workers of a place. Their reaction to an epoch belongs to the task (`training`).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev
from unicron_lightning.jobs import Job
from unicron_lightning.wire.daemon import NodeHello, NodeRun, ToNode

if TYPE_CHECKING:
    from unicron_lightning.simulate.unicron.shell import SimShell
    from unicron_lightning.simulate.unicron.system import System
    from unicron_lightning.simulate.unicron.training import SimTraining

SLOT: Final = "0"
_RELAUNCH_SECONDS: Final = 0.1
"""Interval of torchrun's poll, after which it has detected its worker's death."""


class SimDaemon:
    """The daemon of a place, through all of its lives.

    Args:
        system: the simulated system.
        place: number of the place.
    """

    def __init__(self, system: System, place: int) -> None:
        self.system = system
        self.place = place
        self.label = f"n{place:06d}"
        self.agents: dict[str, SimAgent] = {}
        """Agents by task."""
        self.up = False
        self._conn: int | None = None
        self._life = 0

    @property
    def shell(self) -> SimShell:
        """The coordinator."""
        return self.system.shell

    def start(self) -> None:
        """Start the daemon."""
        self.up = True
        self._life += 1
        if self._conn is not None:  # its absence was not detected yet
            self.shell.disconnect(self._conn)
        self._conn = self.shell.connect(self)
        message = NodeHello(
            protocol=wire.PROTOCOL_VERSION,
            node=self.label,
            host=self.label,
            pid=self._life,
            started_at=self.shell.time,
            slots=[SLOT],
            tasks=[],
        )
        self.shell.say(ev.DaemonMessage(conn=self._conn, message=message))

    def down(self, noticed_in: float) -> None:
        """Kill everything on the node; the coordinator sees its connections end after a number of seconds."""
        self.up = False
        conns = [agent.die() for agent in self.agents.values()]
        self.agents = {}
        for conn in (*conns, self._conn):
            if conn is not None:
                self.system.clock.after(noticed_in, partial(self.shell.disconnect, conn))
        self._conn = None

    def receive(self, message: wire.ToAgent | ToNode) -> None:
        """Process an order to run agents."""
        if not isinstance(message, NodeRun) or not self.up:
            return
        wanted = {launch.job.name: launch.job for launch in message.launches}
        for name in [name for name in self.agents if name not in wanted]:
            agent = self.agents.pop(name)
            self.system.clock.after(0.0, agent.leave)
        for name, job in wanted.items():
            if name not in self.agents:
                self.agents[name] = SimAgent(self, job)

    def closed(self) -> None:
        """Ignore that the coordinator closed the connection because a newer daemon has its label."""


class SimAgent:
    """A torchrun agent with its worker.

    Args:
        daemon: the daemon that started it.
        job: the task's definition.
    """

    def __init__(self, daemon: SimDaemon, job: Job) -> None:
        system = daemon.system
        self.system = system
        self.daemon = daemon
        self.place = daemon.place
        self.job = job
        self.training: SimTraining = system.trainings[job.name]
        self.id = f"{daemon.label}-{system.next_number()}"
        self.conn: int | None = None
        self.alive = True
        self.granted = False
        self.built = False
        """Whether its worker can be, or is, a member."""
        self._round = 0
        self._warm = False
        self._said_hello = False
        self._store = wire.Address(host=daemon.label, port=1)
        system.clock.after(system.costs.extra.get("launch", 0.0), self._register)

    @property
    def worker(self) -> str:
        """Its worker's name in this round."""
        return f"{self.id}/0#{self._round}"

    def say(self, message: wire.FromAgent) -> None:
        """Send a message to the coordinator."""
        if self.alive and self.conn is not None:
            self.system.shell.say(ev.AgentMessage(conn=self.conn, message=message))

    def receive(self, message: wire.ToAgent | ToNode) -> None:
        """Process a message of the coordinator."""
        if not self.alive:
            return
        if type(message) is wire.EpochChange:
            if not self.training.change_for(self, message):
                self.say(wire.EpochWanted(epoch=0))
            return
        if type(message) is wire.Epoch:
            self.training.epoch_for(self, message)
            return
        if type(message) is wire.Go:
            self.training.go(message)
            return
        match message:
            case wire.Grant():
                self._grant(message)
            case wire.Welcome() if message.worker == self.worker:
                build = self.system.costs.extra.get("build", 0.0)
                self._in_this_round(build, partial(self._build, founder=message.founder))
            case wire.Stop():
                self._rendezvous()
            case wire.Fence() if message.worker == self.worker:
                self._rendezvous()
            case wire.Probe():
                # No network is cut in a simulation.
                self.system.clock.after(0.0, partial(self.say, wire.Probed(number=message.number, missed={})))
            case wire.TaskOver():
                self.daemon.agents.pop(self.job.name, None)
                self.system.clock.after(0.0, self.leave)

    def closed(self) -> None:
        """Ignore that the coordinator has closed the connection."""

    def die(self) -> int | None:
        """Die with the machine; return its connection, whose end is not detected yet."""
        self.alive = False
        self._loses_worker()
        return self.conn

    def leave(self) -> None:
        """Exit in order."""
        if self.alive:
            self._loses_worker()
            self.say(wire.Bye(succeeded=False))
            self.alive = False

    def finish(self) -> None:
        """Exit after its worker has finished the task."""
        if self.alive:
            self.say(wire.WorkerDone(worker=self.worker))
            self._loses_worker()
            self.say(wire.Bye(succeeded=True))
            self.alive = False

    def enters(self, epoch: int) -> None:
        """Report that its worker has entered an epoch."""
        fields = {"epoch": epoch}
        self.say(wire.WorkerEvent(worker=self.worker, name="entered_epoch", at=self.system.shell.time, fields=fields))

    def worker_dies(self, known_in: float, cause: str) -> None:
        """Let its worker die, or fail permanently; the death is reported after a number of seconds."""
        self.built = False
        self._in_this_round(known_in, partial(self._tell_of_death, cause))

    # ---- the start of a worker

    def _register(self) -> None:
        if not self.alive:
            return
        self._round = 1
        self.conn = self.system.shell.connect(self)
        job = self.job
        message = wire.Register(
            protocol=wire.PROTOCOL_VERSION,
            task=job.name,
            agent=self.id,
            node=self.daemon.label,
            host=self.daemon.label,
            pid=1,
            min_nodes=job.min_nodes,
            max_nodes=job.max_nodes,
            round=self._round,
            waiting=True,
            granted=False,
            store=self._store,
            local_world=None,
            workers=[],
            epoch=0,
            slot=SLOT,
            weight=job.weight,
        )
        self.say(message)

    def _rendezvous(self) -> None:
        """Stop the worker and wait for the next grant."""
        self._loses_worker()
        self._round += 1
        self._warm = self._said_hello = False
        self._in_this_round(0.0, lambda: self.say(wire.RendezvousBegin(round=self._round, store=self._store)))

    def _loses_worker(self) -> None:
        self.built = False
        if self.granted:
            self.granted = False
            self.training.slot_changes(self)

    def _grant(self, message: wire.Grant) -> None:
        if message.round != self._round:
            return
        started = self._warm
        self._warm = message.warm
        if not message.warm and not self.granted:
            self.granted = True
            self.training.slot_changes(self)
        if not started:
            costs = self.system.costs
            start = max(0.0, costs.takes("start") - costs.extra.get("build", 0.0))
            self._in_this_round(0.0, lambda: self.say(wire.LocalWorld(round=self._round, size=1)))
            self._in_this_round(start, self._hello)

    def _hello(self) -> None:
        if not self._said_hello:
            self._said_hello = True
            capacity = self.job.max_nodes
            self.say(wire.WorkerHello(worker=self.worker, local_rank=0, pid=1, capacity=capacity))

    def _build(self, *, founder: bool) -> None:
        self.built = True
        state = {"step": 0, "has_state": False, "founder": founder}
        self.say(wire.WorkerReady(worker=self.worker, epoch=0, state=state))

    def _tell_of_death(self, cause: str) -> None:
        match cause:
            case "silent":
                message = wire.WorkerDied(worker=self.worker, cause="silent", code=0, at=self.system.shell.time)
            case _:
                message = wire.WorkerDied(worker=self.worker, cause="signal", code=6, at=self.system.shell.time)
        self.say(message)
        self._in_this_round(_RELAUNCH_SECONDS, self._rendezvous)

    def _in_this_round(self, seconds: float, call: object) -> None:
        """Call a function later, unless the worker concerned is gone by then."""
        round_ = self._round

        def due() -> None:
            if self.alive and self._round == round_:
                call()  # type: ignore[operator]

        self.system.clock.after(seconds, due)


def died_of(kind: str) -> str:
    """Return the cause that an agent reports for a worker with an error of this kind."""
    return "silent" if kind in ("silent", "task_hang") else "signal"
