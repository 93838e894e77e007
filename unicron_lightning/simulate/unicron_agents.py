"""A place's daemon and its agents, as the coordinator sees them, and the reaction of a task's workers to epochs.

One simulated worker represents all workers of a place. They act as real workers do (docs/protocol.md). At a fault all
stop where they are. A ``fail`` epoch is answered immediately, a planned one at the next step boundary. After `Go` they
connect, and resume the interrupted step: only the dead workers' part of it is lost. One of them reports the first
finished step.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Final

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev
from unicron_lightning.jobs import Job
from unicron_lightning.simulate.trace import SimTask, TraceFault
from unicron_lightning.wire.daemon import NodeHello, NodeRun, ToNode
from unicron_lightning.wire.epoch_changes import EpochMissed, changed

if TYPE_CHECKING:
    from unicron_lightning.simulate.unicron_system import SimShell, System


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


_TELLS: Final[dict[str, str]] = {
    "fail": "recovered",
    "join": "grown",
    "leave": "shrunk",
    "init": "started",
    "restart": "started",
}
"""Event of the first finished step in an epoch, by kind."""
_MEASURED_WORKERS: Final = 4
"""Workers of the tasks whose changes were measured; more of them take longer (docs/benchmarks.md)."""
_DIGEST: Final = "0" * 64
"""Digest of simulated checkpoints."""


class SimTraining:
    """Training of one task.

    Args:
        system: the simulated system.
        task: the task.
    """

    def __init__(self, system: System, task: SimTask) -> None:
        self.system = system
        self.task = task
        self.meter = system.books.meters[task.name]
        self.costs = system.books.costs[task.name]
        self.members: dict[int, SimAgent] = {}
        """Workers that have the task's state, by place; they all run, or all are blocked."""
        self.granted: dict[str, SimAgent] = {}
        """Agents that have a slot, by id."""
        self.over = False
        self._stands: str | None = "transition"
        """Reason why no steps are made; None: they are."""
        self._epoch: wire.Epoch | None = None
        self._heard: list[SimAgent] = []
        """Agents that have been sent the newest epoch and have not answered."""
        self._settled = 0
        """The newest epoch that has received its `Go`."""
        self._lost_parts: set[int] = set()
        """Places of dead workers whose part of the present step is lost."""
        self._died = False
        """Whether the newest unplanned epoch has lost a member."""
        self._version = 0
        """Rises with each change, which invalidates scheduled calls."""
        self._untold: wire.Epoch | None = None
        """Epoch whose first finished step is not reported yet."""

    @property
    def runs(self) -> bool:
        """Whether it makes steps."""
        return self._stands is None

    @property
    def epoch_number(self) -> int:
        """Number of the newest epoch that its workers have entered."""
        return self._settled

    # ---- what fails

    def struck(self, place: int, fault: TraceFault) -> None:
        """Fail a member, or its connection: all are blocked until they receive a new epoch."""
        now, meter = self.system.clock.now, self.meter
        meter.settle(now)
        meter.bills.strikes(now, fault.kind, meter.waf(meter.places))
        if fault.severity != "SEV3":
            self._lost_parts.add(place)
        self._stand("detecting")

    def node_is_gone(self, place: int) -> None:
        """Remove a member's place, which no longer counts."""
        if self.members.pop(place, None) is not None:
            self._tell_books()

    def repace(self) -> None:
        """Continue at another pace: a member has become slower, or as fast as before."""
        if self.runs and not self.over:
            self._resumes()

    def corrupted(self, fault: TraceFault) -> None:
        """Corrupt the state, undetected for a while."""
        clock, meter = self.system.clock, self.meter
        meter.settle(clock.now)
        meter.position.corrupt()
        seconds, steps = fault.repair, self.costs.extra.get("witness_steps", 0.0)
        if fault.kind == "parameters_differ" and steps and (rate := meter.rate(meter.places)):
            seconds = min(seconds, steps / rate)
        clock.after(seconds, partial(self._rolls_back, fault))

    def _rolls_back(self, fault: TraceFault) -> None:
        """Restart all from the newest checkpoint that is sound, by an operator's order."""
        now, meter = self.system.clock.now, self.meter
        meter.settle(now)
        if self.over or not meter.position.is_corrupted:
            return
        self.system.books.counts["rollbacks"] += 1
        meter.position.back_to_sound()
        if self.runs:  # else its workers are being restarted anyway
            meter.bills.strikes(now, fault.kind, meter.waf(meter.places))
            meter.bills.known(now)
            self._stand("transition")
            self.system.clock.after(self.costs.takes("restart"), partial(self._rolled_back, self._version))

    def _rolled_back(self, version: int) -> None:
        if self._version == version and not self.over:
            self._resumes()

    # ---- messages of the coordinator

    def epoch_for(self, agent: SimAgent, epoch: wire.Epoch) -> None:
        """Deliver an epoch to one of its agents."""
        if self._epoch is None or epoch.number > self._epoch.number:
            self._new_epoch(epoch)
        if self._epoch is not None and epoch.number == self._epoch.number:
            self._heard.append(agent)

    def change_for(self, agent: SimAgent, change: wire.EpochChange) -> bool:
        """Deliver an epoch as a change to one of its agents, which share what they derive; False if it has no base."""
        epoch = self._epoch
        if epoch is None or epoch.number != change.number:
            try:
                epoch = changed(epoch, change)
            except EpochMissed:
                return False
        self.epoch_for(agent, epoch)
        return True

    def _new_epoch(self, epoch: wire.Epoch) -> None:
        self._epoch = epoch
        self._heard = []
        if epoch.kind not in wire.PLANNED:
            self._breaks_off(epoch)
        self._answer_when_due()

    def _answer_when_due(self) -> None:
        """Answer a planned epoch at the end of a step; workers in a transition make a step first."""
        epoch = self._epoch
        if epoch is None or epoch.number <= self._settled:
            return
        if epoch.kind in wire.PLANNED and self.runs:
            self.system.clock.after(self._until_boundary(), partial(self._answer, epoch.number, self._version))
        elif epoch.kind not in wire.PLANNED or self._stands == "idle":
            self.system.clock.after(0.0, partial(self._answer, epoch.number, None))

    def _breaks_off(self, epoch: wire.Epoch) -> None:
        """Stop now; the dead members' part of the present step is lost, or all of it."""
        before = len(self.members)
        names = {member.agent for member in epoch.members}
        dead = self._lost_parts | {place for place, agent in self.members.items() if agent.id not in names}
        self.meter.settle(self.system.clock.now)
        position = self.meter.position
        if epoch.kind == "fail":
            part = min(1.0, len(dead) / max(1, before, len(dead))) if self.system.ablation.partial_reuse else 1.0
            position.lose(position.fraction * part)
            self.members = {place: agent for place, agent in self.members.items() if agent.id in names}
        self._lost_parts, self._died = set(), bool(dead)
        self._stand("transition")
        if self.meter.bills.is_struck:
            self.meter.bills.known(self.system.clock.now)

    def new_life(self) -> None:
        """Return to the newest checkpoint, because no worker with the state is left; training waits for workers."""
        self.meter.settle(self.system.clock.now)
        self.meter.bills.known(self.system.clock.now)
        memory = self.costs.memory_checkpoint_interval is not None and self.system.ablation.memory_checkpoint
        self.meter.position.back_to_checkpoint(memory=memory)
        self.system.books.counts["checkpoints_loaded"] += 1
        self.members = {}
        self._lost_parts = set()
        self._stand("transition")

    def _answer(self, number: int, version: int | None) -> None:
        """Let live workers that have received the epoch stop for it and report."""
        if version not in (None, self._version) or self._epoch is None or self._epoch.number != number:
            return
        if self._epoch.kind in wire.PLANNED and self.runs:
            self._stand("transition")
        self.meter.settle(self.system.clock.now)
        step = int(self.meter.position.steps + 1e-9)
        founding = self._epoch.kind in ("init", "restart")
        with_state = {"step": step, "has_state": True}
        without = {"step": step, "has_state": False}
        heard, self._heard = self._heard, []
        for agent in heard:
            if agent.alive and agent.built:
                has = founding or self.members.get(agent.place) is agent
                state = with_state if has else without
                agent.say(wire.WorkerReady(worker=agent.worker, epoch=number, state=state))

    def go(self, go: wire.Go) -> None:
        """Connect and continue: the epoch is settled."""
        if self._epoch is None or go.epoch != self._epoch.number or go.epoch <= self._settled:
            return
        self._settled = go.epoch
        seconds = self._stands_for(self._epoch)
        there = [self.granted[member.agent] for member in self._epoch.members if member.agent in self.granted]
        self.members = {agent.place: agent for agent in there}
        for agent in there:  # at once: until all have, the coordinator lets all pairs of agents probe, for nothing
            agent.enters(go.epoch)
        self._tell_books()
        self.system.books.counts[f"epochs_{self._epoch.kind}"] += 1
        if self._epoch.kind != "pause":
            seconds = self.system.books.laid_out(self.task.name, len(self.members), seconds)
        then = self._saved if self._epoch.kind == "pause" else self._connected
        self.system.clock.after(seconds, partial(then, self._epoch, self._version))

    def _saved(self, epoch: wire.Epoch, version: int) -> None:
        """Report the checkpoint that a task writes before it pauses."""
        if self._version != version or self.over:
            return
        self.meter.settle(self.system.clock.now)
        self.meter.position.save()
        step = int(self.meter.position.steps + 1e-9)
        for agent in self.members.values():
            if agent.alive:
                path = f"/{self.task.name}"
                saved = wire.CheckpointSaved(worker=agent.worker, path=path, step=step, digest=_DIGEST, parting=True)
                agent.say(saved)
                return

    def _stands_for(self, epoch: wire.Epoch) -> float:
        """Return the seconds from an epoch's `Go` until steps are made in it; they grow with log2 of the workers."""
        workers = len(epoch.members) * self.system.cluster.place_workers
        growth = self.costs.extra.get("doubling", 0.0) * math.log2(max(1.0, workers / _MEASURED_WORKERS))
        return growth + self._changes_for(epoch)

    def _changes_for(self, epoch: wire.Epoch) -> float:
        """Return the seconds for `_MEASURED_WORKERS` workers."""
        costs = self.costs
        if epoch.kind == "fail":
            return costs.takes("continue" if self._died else "reattempt")
        if epoch.kind == "restart" and "restart" in costs.change:
            return max(0.0, costs.takes("restart") - costs.takes("start"))  # the start is behind them
        if epoch.kind == "pause":
            return costs.takes("leave") + costs.persistent_seconds
        return costs.takes("leave" if epoch.kind == "leave" else "join")

    def _connected(self, epoch: wire.Epoch, version: int) -> None:
        if self._version != version or self.over:
            return
        if epoch.hold:
            self._stand("idle")
            self._answer_when_due()
            return
        self._untold = epoch
        self._resumes()

    def _resumes(self) -> None:
        """Make steps from now on, at the present pace."""
        self._stands = None
        self._version += 1
        self._tell_books()
        self._answer_when_due()
        if self._untold is not None:
            self.system.clock.after(self._until_boundary(), partial(self._first_step, self._untold, self._version))
        if self.task.steps is not None:
            left = self.task.steps - self.meter.position.steps
            rate = self.meter.rate(len(self.members))
            self.system.clock.after(max(0.0, left) / rate, partial(self._done, self._version))

    def _first_step(self, epoch: wire.Epoch, version: int) -> None:
        """Report the first finished step in an epoch, by the first member."""
        if self._version != version:
            return
        self._untold = None
        self.meter.settle(self.system.clock.now)
        step = int(self.meter.position.steps + 1e-6)
        first = self.members.get(min(self.members, default=-1))
        if first is not None and first.built:
            fields = {"epoch": epoch.number, "step": step}
            name, at = _TELLS[epoch.kind], self.system.shell.time
            first.say(wire.WorkerEvent(worker=first.worker, name=name, at=at, fields=fields))

    def _done(self, version: int) -> None:
        if self._version == version and not self.over:
            self.ends()
            for agent in list(self.members.values()):
                agent.finish()

    def ends(self) -> None:
        """End the task."""
        self.over = True
        self._version += 1
        self.system.books.ends(self.task.name)
        for meter in self.system.books.meters.values():
            meter.bills.forgive()

    # ---- its state

    def slot_changes(self, agent: SimAgent) -> None:
        """Record that an agent has received or lost its slot."""
        if agent.granted:
            self.granted[agent.id] = agent
        else:
            self.granted.pop(agent.id, None)
        if not self.over:
            self._tell_books()

    def _stand(self, why: str) -> None:
        self._stands = why
        self._version += 1
        self._tell_books()

    def _tell_books(self) -> None:
        if self.over:
            return
        places = len(self.members)
        starting = len(self.granted) - sum(1 for agent in self.members.values() if agent.granted)
        state = "useful" if self.runs and places else self._stands or "transition"
        if not places and not starting:
            state = "idle"
        slowdown = self.system.books.slowdown(self.members.keys()) if state == "useful" else 0.0
        self.system.books.set(self.task.name, state, places, starting, slowdown)  # type: ignore[arg-type]

    def _until_boundary(self) -> float:
        """Return the seconds to the end of the present step."""
        self.meter.settle(self.system.clock.now)
        rate = self.meter.rate(len(self.members))
        left = 1.0 - self.meter.position.fraction
        return max(1e-6, left / rate) if rate and self.system.clock.now >= 0 else 0.0
