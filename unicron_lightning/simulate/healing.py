"""Clusters whose tasks recover one by one: the decisions of a `Policy`, carried out on the virtual clock.

A fault stops its task immediately; when it is detected the policy decides; when the reaction is complete the task makes
steps again. A fault in between restarts this sequence. Places that become usable return to the task that lost them,
else to the first task that has fewer than it was started with, else to a task that waits to be started; otherwise they
are spare.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from unicron_lightning.simulate.accounts import Books
from unicron_lightning.simulate.costs import Costs
from unicron_lightning.simulate.policy import Policy, Reaction, TaskSituation
from unicron_lightning.simulate.result import ARRIVAL, DEPARTURE, FAULT, Clock, SimulationResult, micros
from unicron_lightning.simulate.trace import CORRUPTING, SLOWING, SimCluster, SimTask, Trace, TraceFault, place_terms

Doing = Literal["queued", "running", "detecting", "transition", "waiting", "over"]


@dataclass(kw_only=True)
class HealingTask:
    """State of a task."""

    task: SimTask
    least: int
    declared: int = 0
    size: int = 0
    """Places that it last ran, or was last started, with."""
    doing: Doing = "queued"
    alive: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    """Places whose processes died and whose nodes are healthy."""
    starting: dict[int, int] = field(default_factory=dict)
    """Places whose workers are being started while the others continue, with the number of the start; disjoint from the
    other sets.
    """
    ready: set[int] = field(default_factory=set)
    """Places that are started and wait to be admitted."""
    faults: list[TraceFault] = field(default_factory=list)
    version: int = 0
    """Rises with each change, which invalidates calls scheduled before it."""
    waits: int = 0
    """Times that it has waited for nodes."""


class Healing:
    """One simulation.

    Args:
        policy: decides on reactions.
        cluster: the nodes.
        tasks: all tasks.
        trace: the faults.
        costs: costs of the system.
    """

    def __init__(
        self, policy: Policy, cluster: SimCluster, tasks: Sequence[SimTask], trace: Trace, costs: Costs
    ) -> None:
        self.policy = policy
        self.costs = costs
        self.clock = Clock()
        self.books = Books(cluster, tasks, trace, costs, self.clock)
        self.free = set(range(cluster.num_places))
        in_places = {t.name: place_terms(t, cluster.place_workers, cluster.num_places) for t in tasks}
        self.jobs = {t.name: HealingTask(task=t, least=in_places[t.name].min_workers) for t in tasks}
        self._cell = cluster.cell
        self._owner: dict[int, str] = {}
        """Present or previous owner of each place."""
        self._starts_so_far = 0
        for job in self.jobs.values():
            self._expect(job)
        for fault in trace.faults:
            self.clock.at(micros(fault.at), partial(self._fault, fault), FAULT)

    def run(self) -> SimulationResult:
        """Simulate the whole trace."""
        self.clock.run(micros(self.books.trace.seconds))
        return self.books.result(self.policy.name)

    def _expect(self, job: HealingTask) -> None:
        task = job.task
        if task.arrival > 0:
            self.clock.at(micros(task.arrival), partial(self._arrives, job), ARRIVAL)
        elif self._takes_places(job):
            self.books.laid_out(task.name, len(job.alive), 0.0)
            self._runs(job)
        if task.departure is not None:
            self.clock.at(micros(task.departure), partial(self._departs, job), DEPARTURE)

    # ---- tasks come and go

    def _arrives(self, job: HealingTask) -> None:
        for other in self.jobs.values():
            self.books.meters[other.task.name].bills.forgive()
        self._start(job)

    def _start(self, job: HealingTask) -> None:
        if self._takes_places(job):
            seconds = self.books.costs[job.task.name].takes("restart")
            self._change(job, Reaction(places=job.declared, seconds=seconds))

    def _takes_places(self, job: HealingTask) -> bool:
        """Give a new task the places it would have in the ideal, as far as they are free."""
        wanted = int(self.books.ideal.places[job.task.name].at(self.clock.now))
        taken = sorted(self.free)[: max(wanted, job.least)]
        if len(taken) < job.least:
            return False
        job.declared = job.size = len(taken)
        self._take(job, taken)
        return True

    def _take(self, job: HealingTask, places: list[int]) -> None:
        self.free.difference_update(places)
        job.alive.update(places)
        self._owner.update(dict.fromkeys(places, job.task.name))

    def _departs(self, job: HealingTask) -> None:
        if job.doing == "over":
            return
        job.doing = "over"
        job.version += 1
        self.books.ends(job.task.name)
        for other in self.jobs.values():
            self.books.meters[other.task.name].bills.forgive()
        places = job.alive | job.dead | job.starting.keys() | job.ready
        job.alive, job.dead, job.starting, job.ready = set(), set(), {}, set()
        for place in sorted(places):
            self._offer(place)

    # ---- faults

    def _fault(self, fault: TraceFault) -> None:
        if fault.node in self.books.down:
            self.books.takes_down(fault, self._repaired)
            return
        place = fault.node // self._cell
        was_up = self.books.place_is_up(place)
        job = self.jobs.get(self._owner.get(place, ""))
        self.books.counts["faults"] += 1
        if fault.kind in SLOWING:
            self.books.slows(fault, self._repace)
            return
        if fault.kind in CORRUPTING:
            if job is not None and place in job.alive and job.doing != "over":
                self._corrupts(job, fault)
            return
        if not was_up:
            self.books.takes_down(fault, self._repaired)
            return
        stops = job is not None and place in job.alive and job.doing in ("running", "detecting", "transition")
        if job is not None and stops:
            meter = self.books.meters[job.task.name]
            meter.settle(self.clock.now)
            meter.bills.strikes(self.clock.now, fault.kind, meter.waf(meter.places))
        if fault.takes_node:
            self._leaves(place, job)
            self.books.takes_down(fault, self._repaired)
        elif job is not None and fault.severity != "SEV3" and place in job.alive:
            died = set(job.alive) if fault.strikes == "task" else {place}
            job.alive -= died
            job.dead |= died
        if job is not None and stops:
            job.faults.append(fault)
            self._stops(job, fault)
        elif job is not None and job.doing not in ("over", "queued"):
            self._tell(job)

    def _repace(self, node: int) -> None:
        """Let a running task make steps at its new pace, if a node of its own has changed."""
        place = node // self._cell
        job = self.jobs.get(self._owner.get(place, ""))
        if job is not None and job.doing == "running" and place in job.alive:
            self._runs(job)

    def _corrupts(self, job: HealingTask, fault: TraceFault) -> None:
        meter = self.books.meters[job.task.name]
        meter.settle(self.clock.now)
        meter.position.corrupt()
        self.clock.after(fault.repair, partial(self._rolls_back, job, fault))

    def _rolls_back(self, job: HealingTask, fault: TraceFault) -> None:
        """Restart all from the newest checkpoint that is sound, when corrupted state is detected."""
        meter = self.books.meters[job.task.name]
        meter.settle(self.clock.now)
        if job.doing == "over" or not meter.position.is_corrupted:
            return
        self.books.counts["rollbacks"] += 1
        meter.position.back_to_sound()
        if job.doing == "running":  # else it is being restarted anyway
            meter.bills.strikes(self.clock.now, fault.kind, meter.waf(meter.places))
            meter.bills.known(self.clock.now)
            self._change(job, Reaction(places=len(job.alive), seconds=self.books.costs[job.task.name].takes("restart")))

    def _leaves(self, place: int, job: HealingTask | None) -> None:
        self.free.discard(place)
        if job is not None:
            for places in (job.alive, job.dead, job.ready):
                places.discard(place)
            job.starting.pop(place, None)

    def _stops(self, job: HealingTask, fault: TraceFault) -> None:
        seconds = self.policy.notices(self.books.costs[job.task.name], fault)
        if job.doing != "detecting":
            job.doing = "detecting"
            job.version += 1
            self.clock.after(seconds, partial(self._known, job, job.version))
        self._tell(job)

    def _known(self, job: HealingTask, version: int) -> None:
        if job.version != version:
            return
        self.books.meters[job.task.name].bills.known(self.clock.now)
        situation = self._situation(job)
        job.faults.clear()
        self._change(job, self.policy.reacts(situation))

    # ---- changes

    def _situation(self, job: HealingTask) -> TaskSituation:
        return TaskSituation(
            task=job.task,
            costs=self.books.costs[job.task.name],
            declared=job.declared,
            size=job.size,
            least=job.least,
            alive=len(job.alive | job.ready),
            dead=len(job.dead) + len(job.starting),
            spares=len(self.free),
            faults=tuple(job.faults),
        )

    def _change(self, job: HealingTask, reaction: Reaction) -> None:
        """Carry out a reaction."""
        meter = self.books.meters[job.task.name]
        meter.settle(self.clock.now)
        self._lose(job, reaction)
        job.version += 1
        job.alive |= job.ready
        job.ready = set()
        if not reaction.places:
            self._waits(job)
            return
        job.size = reaction.places
        missing = reaction.places - len(job.alive)
        for place in sorted(job.dead | job.starting.keys())[: max(0, missing)]:
            job.alive.add(place)
            job.dead.discard(place)
            job.starting.pop(place, None)
        spares = sorted(self.free)[: max(0, reaction.places - len(job.alive))]
        self._take(job, spares)
        for place in sorted(job.alive)[reaction.places :]:
            job.alive.discard(place)
            job.ready.add(place)
        for place in sorted(job.dead) if self.policy.starts_dead else ():
            self._starts(job, place)
        job.doing = "transition"
        self.books.counts["transitions"] += 1
        self._tell(job)
        seconds = self.books.laid_out(job.task.name, len(job.alive), reaction.seconds)
        self.clock.after(seconds, partial(self._done, job, job.version))

    def _waits(self, job: HealingTask) -> None:
        """Let a task wait for nodes, until operators lose patience."""
        patience = self.policy.patience(self.costs)
        if job.doing != "waiting":
            job.waits += 1
            if not math.isinf(patience):
                self.clock.after(patience, partial(self._scale_down, job, job.waits))
        job.doing = "waiting"
        self._tell(job)

    def _scale_down(self, job: HealingTask, wait: int) -> None:
        if job.doing == "waiting" and job.waits == wait:
            job.size = job.least
            self._change(job, self.policy.scaled_down(self._situation(job)))

    def _lose(self, job: HealingTask, reaction: Reaction) -> None:
        position = self.books.meters[job.task.name].position
        if reaction.loses == "step":
            position.lose(position.fraction)
        elif reaction.loses != "nothing":
            self.books.counts["checkpoints_loaded"] += 1
            position.back_to_checkpoint(memory=reaction.loses == "memory")

    def _starts(self, job: HealingTask, place: int) -> None:
        """Start a place's workers while the others continue."""
        job.dead.discard(place)
        self._starts_so_far += 1
        job.starting[place] = self._starts_so_far
        self.clock.after(self.costs.change.get("start", 0.0), partial(self._started, job, place, self._starts_so_far))

    def _started(self, job: HealingTask, place: int, number: int) -> None:
        if job.starting.get(place) == number:
            del job.starting[place]
            job.ready.add(place)
            self._tell(job)
            self._consider(job)

    def _done(self, job: HealingTask, version: int) -> None:
        if job.version == version:
            self._runs(job)
            self._consider(job)

    def _runs(self, job: HealingTask) -> None:
        job.doing = "running"
        job.version += 1
        self._tell(job)
        if job.task.steps is not None:
            self._expect_end(job)

    def _expect_end(self, job: HealingTask) -> None:
        meter = self.books.meters[job.task.name]
        assert job.task.steps is not None
        left, rate = job.task.steps - meter.position.steps, meter.rate(len(job.alive))
        if rate:
            self.clock.after(max(0.0, left) / rate, partial(self._ends, job, job.version))

    def _ends(self, job: HealingTask, version: int) -> None:
        if job.version == version:
            self._departs(job)

    def _consider(self, job: HealingTask) -> None:
        """Let the policy admit places beyond those that the task runs with."""
        if job.doing == "waiting":
            resumed = self.policy.resumes(self._situation(job))
            if resumed.places:
                self._change(job, resumed)
        elif job.doing == "running" and self.policy.grows(self._situation(job)) is not None:
            missing = job.declared - len(job.alive) - len(job.starting) - len(job.ready)
            spares = sorted(self.free)[: max(0, missing)]
            for place in spares:
                self._take(job, [place])
                job.alive.discard(place)
                self._starts(job, place)
            grown = self.policy.grows(replace(self._situation(job), spares=0)) if job.ready else None
            if grown is not None and grown.places > len(job.alive):
                self._change(job, grown)
            elif spares:
                self._tell(job)

    def _tell(self, job: HealingTask) -> None:
        """Report the task's state to the books."""
        doing, name = job.doing, job.task.name
        if doing == "running":
            self.books.set(name, "useful", len(job.alive), len(job.starting), self.books.slowdown(job.alive))
        elif doing in ("detecting", "transition"):
            held = len(job.alive) + len(job.dead)
            self.books.set(name, "detecting" if doing == "detecting" else "transition", held, len(job.starting))
        elif doing == "waiting":
            self.books.set(name, "idle", len(job.alive | job.dead | job.ready | job.starting.keys()))

    # ---- places

    def _repaired(self, node: int) -> None:
        place = node // self._cell
        if self.books.node_up(node) and self.books.place_is_up(place):
            self._offer(place)

    def _offer(self, place: int) -> None:
        """Offer a place that has become usable and is not in use."""
        self.free.add(place)
        owner = self.jobs.get(self._owner.get(place, ""))
        first = [owner] if owner is not None and owner.doing in ("running", "waiting") else []
        for job in [*first, *self.jobs.values()]:
            if job.doing in ("running", "waiting") and place in self.free:
                self._consider(job)
        for job in self.jobs.values():
            if job.doing == "queued" and job.task.arrival <= self.clock.seconds:
                self._start(job)
