"""Unicron on a virtual clock: the real coordinator, a daemon per place, tasks that are submitted as jobs are.

`SimShell` is the coordinator without its I/O. Messages take no time. Messages sent by agents at the same moment are
processed together. Peers send their answers through the clock, never from within a callback.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final, Literal, Protocol

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.allocation import answers
from unicron_lightning.coordinator.allocation.answers import Knowledge, allocation_of, keep, state_of
from unicron_lightning.coordinator.config import PlannerConfig
from unicron_lightning.coordinator.events import Question
from unicron_lightning.coordinator.incidents.facts import LifeBegun
from unicron_lightning.coordinator.machine import Machine
from unicron_lightning.coordinator.state import Cluster
from unicron_lightning.jobs import Job, stating
from unicron_lightning.simulate.accounts import Books
from unicron_lightning.simulate.costs import Costs
from unicron_lightning.simulate.result import ARRIVAL, DEPARTURE, FAULT, Clock, SimulationResult, micros
from unicron_lightning.simulate.trace import (
    CORRUPTING,
    SLOWING,
    PlaceSpeed,
    SimCluster,
    SimTask,
    Trace,
    TraceFault,
    place_terms,
)
from unicron_lightning.simulate.unicron_agents import SimAgent, SimDaemon, SimTraining, died_of
from unicron_lightning.wire.daemon import ToNode

if TYPE_CHECKING:
    from unicron_lightning.planner.performance.model import PerformanceModel
    from unicron_lightning.planner.reward import Curve


_ORIGIN: Final = 1e9
"""time.time() at the beginning of the trace; 0 is reserved by the machine for unset times."""


class _SimPeer(Protocol):
    """The owner of a connection."""

    def receive(self, message: wire.ToAgent | ToNode) -> None:
        """Receives a message."""

    def closed(self) -> None:
        """Called when the coordinator has closed the connection."""


class SimShell:
    """One coordinator.

    Args:
        clock: the virtual clock.
        limits: parameters of the machine.
        plan: answers its questions.
        seen: receives each logged event.
    """

    def __init__(
        self,
        clock: Clock,
        limits: ev.Limits,
        plan: Callable[[Question], ev.Planned],
        seen: Callable[[ev.Emit], None],
    ) -> None:
        self.machine = Machine(limits)
        self._clock = clock
        self._plan = plan
        self._seen = seen
        self._peers: dict[int, _SimPeer] = {}
        self._conns = itertools.count(1)
        self._timers: dict[ev.TimerKey, int] = {}
        """Number of the valid setting of each timer."""
        self._settings = itertools.count()
        self._said: list[ev.AgentMessage | ev.DaemonMessage] = []
        self._back_at: int | None = None
        """Time at which a failed coordinator is back, in microseconds; None: it runs."""
        self._held: list[ev.Input] = []
        """Inputs of the time without a coordinator."""
        self.do(ev.Started())

    @property
    def time(self) -> float:
        """time.time()."""
        return _ORIGIN + self._clock.seconds

    def connect(self, peer: _SimPeer) -> int:
        """Open a connection."""
        conn = next(self._conns)
        self._peers[conn] = peer
        return conn

    def disconnect(self, conn: int) -> None:
        """Handle the end of a connection."""
        if self._peers.pop(conn, None) is not None:
            self.do(ev.Disconnected(conn=conn))

    def say(self, said: ev.AgentMessage | ev.DaemonMessage) -> None:
        """Queue a message, to be processed with all others of this moment."""
        if not self._said:
            self._clock.after(0.0, self._take_in)
        self._said.append(said)

    def do(self, event: ev.Input) -> None:
        """Process one input, and its consequences."""
        self._take_in()
        self._handle(event)

    def fail(self, until: int) -> None:
        """Stop the coordinator until a time. Its state is stored; agents repeat what they could not report."""
        self._take_in()
        self._back_at = max(until, self._back_at or 0)
        self._clock.at(self._back_at, self._returns)

    def _returns(self) -> None:
        if self._back_at is not None and self._clock.now >= self._back_at:
            self._back_at = None
            held, self._held = self._held, []
            for event in held:
                self._handle(event)

    def _take_in(self) -> None:
        said, self._said = self._said, []
        if said:
            self._handle(ev.MessageBatch(received=tuple(said)) if len(said) > 1 else said[0])

    def _handle(self, event: ev.Input) -> None:
        if self._back_at is not None:
            self._held.append(event)
            return
        peers = self._peers
        for action in self.machine.handle(event, self.time):
            if type(action) is ev.Send:  # nearly all actions are; many send notices, which have no effect here
                peer = peers.get(action.conn)
                if peer is not None and type(action.message) is not wire.Notice:
                    peer.receive(action.message)
                continue
            match action:
                case ev.Emit():
                    self._seen(action)
                case ev.SetTimer(key=key, seconds=seconds):
                    self._set_timer(key, seconds)
                case ev.CancelTimer(key=key):
                    self._timers.pop(key, None)
                case ev.Close(conn=conn):
                    self._clock.after(0.0, lambda conn=conn: self._close(conn))  # type: ignore[misc]
                case ev.RequestPlan(question=question):
                    self._clock.after(0.0, lambda question=question: self.do(self._plan(question)))  # type: ignore[misc]

    def _close(self, conn: int) -> None:
        peer = self._peers.get(conn)
        if peer is not None:
            peer.closed()
            self.disconnect(conn)

    def _set_timer(self, key: ev.TimerKey, seconds: float) -> None:
        number = self._timers[key] = next(self._settings)
        self._clock.after(seconds, lambda: self._fire(key, number))

    def _fire(self, key: ev.TimerKey, number: int) -> None:
        if self._back_at is not None:
            self._clock.at(self._back_at, lambda: self._fire(key, number))
        elif self._timers.get(key) == number:
            del self._timers[key]
            self.do(ev.TimerFired(key=key))


_NOT_IN_BAND_SECONDS: Final = 1800.0
"""A collective's default time-out, after which a failure is detected if nothing else reports it."""
_UNDRAIN_SECONDS: Final = 86400.0
"""Seconds until an operator undrains a cordoned node, unless ``extra["undrain"]`` gives another number."""


Allocation = Literal["plan", "keep", "equal", "weight", "size"]
"""Places by task: the planner's; as they are, without the planner; or by static shares."""


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """Selection of Unicron's parts."""

    name: str = "unicron"
    partial_reuse: bool = True
    allocation: Allocation = "plan"
    in_band: bool = True
    memory_checkpoint: bool = True
    may_pause: bool = False


ABLATIONS: Final = (
    Ablation(),
    Ablation(name="unicron_no_partial_reuse", partial_reuse=False),
    Ablation(name="unicron_no_planner", allocation="keep"),
    Ablation(name="unicron_equal", allocation="equal"),
    Ablation(name="unicron_by_weight", allocation="weight"),
    Ablation(name="unicron_by_size", allocation="size"),
    Ablation(name="unicron_no_inband", in_band=False),
    Ablation(name="unicron_no_memory_checkpoint", memory_checkpoint=False),
    Ablation(name="unicron_may_pause", may_pause=True),
)


class System:
    """One simulation.

    Args:
        ablation: the selected parts.
        cluster: the nodes.
        tasks: all tasks.
        trace: the faults.
        costs: measured costs.
        limits: parameters of the coordinator.
    """

    def __init__(
        self,
        ablation: Ablation,
        cluster: SimCluster,
        tasks: Sequence[SimTask],
        trace: Trace,
        costs: Costs,
        limits: ev.Limits,
    ) -> None:
        self.ablation = ablation
        self.cluster = cluster
        if not ablation.in_band:
            late = {kind: max(seconds, _NOT_IN_BAND_SECONDS) for kind, seconds in costs.detection.items()}
            costs = replace(costs, detection=late)
        self.costs = costs
        # A task below its minimum waits for repairs as those of the other systems do.
        held = replace(limits.severity, hold_timeout=max(limits.severity.hold_timeout, trace.seconds))
        self._limits = replace(limits, severity=held)
        before = 60.0 + 20.0 * (costs.takes("start") + costs.takes("join") + costs.extra.get("launch", 0.0))
        self.clock = Clock(start=-micros(before))
        self.books = Books(cluster, tasks, trace, costs, self.clock)
        self._numbers = 0
        self._speeds = {task.name: PlaceSpeed(task, cluster.place_workers) for task in tasks}
        self._curves: dict[object, Curve] = {}
        self._shares = shares_of(tasks, ablation.allocation)
        self.trainings = {task.name: SimTraining(self, task) for task in tasks}
        self.shell = SimShell(self.clock, self._limits, self._plan, self._seen)
        self.daemons = [SimDaemon(self, place) for place in range(cluster.num_places)]
        for task in tasks:
            self._expect(task)
        for daemon in self.daemons:  # after the tasks, so that the first plan covers all of them
            daemon.start()
        for fault in trace.faults:
            self.clock.at(micros(fault.at), partial(self._fault, fault), FAULT)
        for begin, end in trace.coordinator_outages:
            self.clock.at(micros(begin), partial(self.shell.fail, micros(end)), FAULT)

    def run(self) -> SimulationResult:
        """Simulate the whole trace."""
        self.clock.run(micros(self.books.trace.seconds))
        return self.books.result(self.ablation.name)

    def next_number(self) -> int:
        """Return a new number for an agent."""
        self._numbers += 1
        return self._numbers

    # ---- tasks

    def _expect(self, task: SimTask) -> None:
        if task.arrival > 0:
            self.clock.at(micros(task.arrival), partial(self._arrives, task), ARRIVAL)
        else:
            self._submit(task)
        if task.departure is not None:
            self.clock.at(micros(task.departure), partial(self._departs, task), DEPARTURE)

    def _arrives(self, task: SimTask) -> None:
        for meter in self.books.meters.values():
            meter.bills.forgive()
        self._submit(task)

    def _submit(self, task: SimTask) -> None:
        in_places = place_terms(task, self.cluster.place_workers, self.cluster.num_places)
        terms = replace(in_places, may_pause=self.ablation.may_pause)
        job = Job(name=task.name, command=["train"], flops_per_step=task.flops_per_step, **stating(terms))
        self.shell.do(ev.Submit(jobs=(job,)))

    def _departs(self, task: SimTask) -> None:
        training = self.trainings[task.name]
        if not training.over:
            training.ends()
            self.shell.do(ev.Cancel(task=task.name))

    def _plan(self, question: Question) -> ev.Planned:
        self.books.counts["plans"] += 1
        if self.ablation.allocation == "keep":
            return keep(question)
        if self.ablation.allocation != "plan":
            return static(question, self.cluster.num_places, self._shares)
        known = _knowledge(self.shell.machine.cluster, self._speeds, self.costs)
        return _answer(question, replace(known, curves=self._curves))

    def _seen(self, event: ev.Emit) -> None:
        match event.name:
            case LifeBegun.event if event.task is not None:
                self.trainings[event.task].new_life()
            case "node_cordoned":
                self.books.counts["cordons"] += 1
                node = str(event.fields["node"])
                seconds = self.costs.extra.get("undrain", _UNDRAIN_SECONDS)
                self.clock.after(seconds, lambda: self.shell.do(ev.Drain(node=node, drained=False)))
            case "task_stopped" if event.task is not None and not self.trainings[event.task].over:
                self.books.counts["tasks_stopped"] += 1
                self.trainings[event.task].ends()

    # ---- faults

    def _fault(self, fault: TraceFault) -> None:
        place = fault.node // self.cluster.cell
        daemon = self.daemons[place]
        if fault.node in self.books.down:
            self.books.takes_down(fault, self._repaired)
            return
        self.books.counts["faults"] += 1
        member = self._member(place)
        if fault.kind in SLOWING:
            self.books.slows(fault, self._repace)
            return
        if fault.kind in CORRUPTING:
            if member is not None:
                member.corrupted(fault)
            return
        whole = fault.takes_node or fault.severity == "SEV1"
        if not whole:
            self._worker_fault(fault, daemon, member)
        elif daemon.up:
            if member is not None:
                member.struck(place, fault)
                member.node_is_gone(place)
            noticed = max(0.0, self.costs.detects(fault.kind) - self._limits.reconnect_grace)
            daemon.down(noticed)
        if whole:
            self._out_of_order(fault, daemon)

    def _out_of_order(self, fault: TraceFault, daemon: SimDaemon) -> None:
        """Keep the node down until it is repaired, at least until its failure is detected."""
        if fault.takes_node:
            self.books.takes_down(fault, self._repaired)
        else:
            self.clock.after(self.costs.detects(fault.kind), partial(self._comes_back, daemon))

    def _repaired(self, node: int) -> None:
        if self.books.node_up(node):
            self._comes_back(self.daemons[node // self.cluster.cell])

    def _member(self, place: int) -> SimTraining | None:
        """Return the task that a place trains."""
        return next((t for t in self.trainings.values() if not t.over and place in t.members), None)

    def _repace(self, node: int) -> None:
        member = self._member(node // self.cluster.cell)
        if member is not None:
            member.repace()

    def _comes_back(self, daemon: SimDaemon) -> None:
        if not daemon.up and self.books.place_is_up(daemon.place):
            daemon.start()

    def _worker_fault(self, fault: TraceFault, daemon: SimDaemon, member: SimTraining | None) -> None:
        seconds = self.costs.detects(fault.kind)
        if fault.severity == "SEV3":
            if member is not None and member.runs:
                agent = member.members[daemon.place]
                member.struck(daemon.place, fault)
                self.clock.after(max(0.0, seconds - self._limits.comm_error_grace), partial(_tell, agent, fault))
            return
        agents = [agent for agent in daemon.agents.values() if agent.granted][:1]
        if member is not None and daemon.place in member.members:
            agents = [member.members[daemon.place]]
            if fault.strikes == "task":
                agents = list(member.members.values())
            for agent in agents:
                member.struck(agent.place, fault)
        for agent in agents:
            agent.worker_dies(seconds, died_of(fault.kind))


def _tell(agent: SimAgent, fault: TraceFault) -> None:
    """Report a failed collective that no newer epoch explains."""
    epoch = agent.training.epoch_number
    agent.say(wire.CommError(worker=agent.worker, epoch=epoch, error=fault.kind))


def shares_of(tasks: Sequence[SimTask], allocation: Allocation) -> dict[str, float]:
    """Return the share of each task in a static allocation. Size is that of the state, or FLOPs per step if unknown."""
    if allocation == "weight":
        return {task.name: task.terms.weight for task in tasks}
    if allocation == "size":
        sizes = {task.name: task.state_gigabytes for task in tasks if task.state_gigabytes is not None}
        return sizes if len(sizes) == len(tasks) else {task.name: task.flops_per_step for task in tasks}
    return {task.name: 1.0 for task in tasks}


def static(question: Question, num_places: int, shares: Mapping[str, float]) -> ev.Planned:
    """Answer a question by fixed shares of the cluster: no other task makes up for a place that a task has lost.

    Each task has its minimum, and each further place goes to the task that is furthest below its share and can use it.

    Args:
        question: the question.
        num_places: places of the cluster, those under repair included.
        shares: shares by task, in any unit.
    """
    whole = sum(shares[task.name] for task in question.tasks)
    wanted = {task.name: task.terms.min_workers for task in question.tasks}
    for _ in range(num_places - sum(wanted.values())):
        able = [task.name for task in question.tasks if wanted[task.name] < task.max_places]
        if not able:
            break
        wanted[max(able, key=lambda name: num_places * shares[name] / whole - wanted[name])] += 1
    places = {task.name: min(task.left, wanted[task.name]) for task in question.tasks}
    free = question.num_places - sum(places.values())
    for name, number in wanted.items():
        more = min(number - places[name], free)
        places[name], free = places[name] + more, free - more
    return ev.Planned(key=question.key, allocation=places)


def _answer(question: Question, known: Knowledge) -> ev.Planned:
    """Answer the machine as `coordinator.allocation.answers` does: with the same planner, state and estimates."""
    from unicron_lightning.planner.search.dynamic_program import compile_all
    from unicron_lightning.planner.solver import solve

    compile_all()  # a simulation makes thousands of small plans
    plan = solve(state_of(question, known))
    return ev.Planned(key=question.key, allocation=allocation_of(question, plan), waf=plan.waf)


def _knowledge(cluster: Cluster, performances: Mapping[str, PerformanceModel], costs: Costs) -> Knowledge:
    """Combine the tasks' exact speeds with the coordinator's measurements of everything else.

    Args:
        cluster: the machine's state.
        performances: T(t,x) by number of places. In the real system these are profiles, corrected by measured steps.
        costs: an operator's estimates of transitions before any was measured.
    """
    tasks = cluster.tasks
    start = max(1e-3, costs.takes("start") + costs.takes("join"))
    planner = PlannerConfig(
        node_mtbf_hours=costs.extra.get("node_mtbf_hours", 720.0),
        worker_mtbf_hours=costs.extra.get("worker_mtbf_hours", 720.0),
        shrink_seconds=max(1e-3, costs.takes("continue")),
        grow_seconds=max(1e-3, costs.takes("join")),
        restart_seconds=start,
        cold_seconds=start,
    )
    failures = answers.failure_model(tasks, cluster.lasting.lifetimes, planner)
    transitions = answers.transition_times(tasks, planner)
    return Knowledge(
        performances=performances,
        running_seconds=failures.running_seconds,
        transition_seconds=transitions.expected_seconds,
        relayout_seconds=lambda _: costs.laid_out(0.0),
    )
