"""Unicron on a virtual clock: the real coordinator, a daemon per place, tasks that are submitted as jobs are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from unicron_lightning import wire
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.allocation import estimates
from unicron_lightning.coordinator.allocation.answers import Knowledge, allocation_of, keep, state_of
from unicron_lightning.coordinator.allocation.request import Question
from unicron_lightning.coordinator.config.schema import PlannerConfig
from unicron_lightning.coordinator.incidents.facts import LifeBegun
from unicron_lightning.coordinator.state import Cluster
from unicron_lightning.jobs import Job, stating
from unicron_lightning.simulate import clock as order
from unicron_lightning.simulate.accounts.books import Books
from unicron_lightning.simulate.clock import Clock, micros
from unicron_lightning.simulate.costs import Costs
from unicron_lightning.simulate.result import SimulationResult
from unicron_lightning.simulate.speeds import PlaceSpeed, place_terms
from unicron_lightning.simulate.trace import CORRUPTING, SLOWING, SimCluster, Trace, TraceFault
from unicron_lightning.simulate.unicron.agents import SimAgent, SimDaemon, died_of
from unicron_lightning.simulate.unicron.shell import SimShell
from unicron_lightning.simulate.unicron.training import SimTraining
from unicron_lightning.simulate.workload import SimTask

if TYPE_CHECKING:
    from unicron_lightning.planner.performance.model import PerformanceModel
    from unicron_lightning.planner.reward import Curve

_NOT_IN_BAND_SECONDS: Final = 1800.0
"""A collective's default time-out, after which a failure is detected if nothing else reports it."""
_UNDRAIN_SECONDS: Final = 86400.0
"""Seconds until an operator undrains a cordoned node, unless ``extra["undrain"]`` gives another number."""


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """Selection of Unicron's parts."""

    name: str = "unicron"
    partial_reuse: bool = True
    planner: bool = True
    in_band: bool = True
    memory_checkpoint: bool = True
    may_pause: bool = False


ABLATIONS: Final = (
    Ablation(),
    Ablation(name="unicron_no_partial_reuse", partial_reuse=False),
    Ablation(name="unicron_no_planner", planner=False),
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
    """

    def __init__(
        self, ablation: Ablation, cluster: SimCluster, tasks: Sequence[SimTask], trace: Trace, costs: Costs
    ) -> None:
        self.ablation = ablation
        self.cluster = cluster
        if not ablation.in_band:
            late = {kind: max(seconds, _NOT_IN_BAND_SECONDS) for kind, seconds in costs.detection.items()}
            costs = replace(costs, detection=late)
        self.costs = costs
        self._limits = ev.Limits(warm_standby=True)
        before = 60.0 + 20.0 * (costs.takes("start") + costs.takes("join") + costs.extra.get("launch", 0.0))
        self.clock = Clock(start=-micros(before))
        self.books = Books(cluster, tasks, trace, costs, self.clock)
        self._numbers = 0
        self._speeds = {task.name: PlaceSpeed(task, cluster.place_workers) for task in tasks}
        self._curves: dict[object, Curve] = {}
        self.trainings = {task.name: SimTraining(self, task) for task in tasks}
        self.shell = SimShell(self.clock, self._limits, self._plan, self._seen)
        self.daemons = [SimDaemon(self, place) for place in range(cluster.num_places)]
        for task in tasks:
            self._expect(task)
        for daemon in self.daemons:  # after the tasks, so that the first plan covers all of them
            daemon.start()
        for fault in trace.faults:
            self.clock.at(micros(fault.at), partial(self._fault, fault), order.FAULT)
        for begin, end in trace.coordinator_outages:
            self.clock.at(micros(begin), partial(self.shell.fail, micros(end)), order.FAULT)

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
            self.clock.at(micros(task.arrival), partial(self._arrives, task), order.ARRIVAL)
        else:
            self._submit(task)
        if task.departure is not None:
            self.clock.at(micros(task.departure), partial(self._departs, task), order.DEPARTURE)

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
        if not self.ablation.planner:
            return keep(question)
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
            case "task_stopped":
                self.books.counts["tasks_stopped"] += 1

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
                member.corrupted()
                self.clock.after(fault.repair, partial(member.rolls_back, fault))
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
    failures = estimates.failure_model(tasks, cluster.lasting.lifetimes, planner)
    transitions = estimates.transition_times(tasks, planner)
    return Knowledge(
        performances=performances,
        running_seconds=failures.running_seconds,
        transition_seconds=transitions.expected_seconds,
        relayout_seconds=lambda _: costs.change.get("restart", 0.0) + costs.persistent_seconds,
    )
