"""The books of one simulation: a meter for each task, the nodes that are down, and the result made of both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial

import numpy as np

from unicron_lightning.simulate.accounts.ideal import Ideal
from unicron_lightning.simulate.accounts.meter import TaskMeter
from unicron_lightning.simulate.clock import REPAIR, Clock, micros
from unicron_lightning.simulate.costs import Costs
from unicron_lightning.simulate.result import LOSSES, MICRO, STATES, LossKind, SimulationResult, TaskResult, WorkerState
from unicron_lightning.simulate.trace import SimCluster, Trace, TraceFault
from unicron_lightning.simulate.workload import SimTask


class Books:
    """Books of one cluster.

    Args:
        cluster: the nodes.
        tasks: all tasks of the simulation.
        trace: the faults.
        costs: costs of the system that runs the tasks.
        clock: the virtual clock.
    """

    def __init__(self, cluster: SimCluster, tasks: Sequence[SimTask], trace: Trace, costs: Costs, clock: Clock) -> None:
        self.cluster = cluster
        self.trace = trace
        self.clock = clock
        self.ideal = Ideal.of(cluster, tasks, trace.seconds)
        self.costs = {task.name: costs.sized(*cluster.transfer_seconds(task)) for task in tasks}
        """Costs by task: those that depend on the size of its state differ."""
        self.meters = {
            task.name: TaskMeter(task, self.costs[task.name], cluster.place_workers, self.ideal.waf[task.name])
            for task in tasks
        }
        self.down: dict[int, int] = {}
        """Nodes under repair, with the time of their return, in microseconds."""
        self.degraded: dict[int, list[float]] = {}
        """Slowdowns of nodes that are slower than others."""
        self.counts: Counter[str] = Counter()
        self._down_micros = 0
        self._down_since = 0
        self._gone: dict[str, int] = {}
        for meter in self.meters.values():
            meter.begin(micros(meter.task.arrival))

    def takes_down(self, fault: TraceFault, repaired: Callable[[int], None]) -> None:
        """Record that a node's repair begins, or lasts longer; ``repaired`` is called with the node at its end.

        A fault that takes no node changes nothing.
        """
        if not fault.takes_node:
            return
        self._settle_down()
        node, until = fault.node, micros(fault.at + fault.repair)
        if until <= self.down.get(node, -1):
            return
        if node in self.down:
            self.counts["repairs_prolonged"] += 1
        self.down[node] = until
        self.clock.at(until, partial(repaired, node), REPAIR)

    def node_up(self, node: int) -> bool:
        """Record that a node can be used again, unless its repair was prolonged; return whether it can."""
        self._settle_down()
        if self.down.get(node, 0) > self.clock.now:
            return False
        self.down.pop(node, None)
        return True

    def slows(self, fault: TraceFault, changed: Callable[[int], None]) -> None:
        """Record that a node has become slower than others; ``changed`` is called with it now and when that ends."""
        self.degraded.setdefault(fault.node, []).append(fault.slowdown)
        changed(fault.node)
        if fault.repair:
            self.clock.at(micros(fault.at + fault.repair), partial(self._recovers, fault, changed), REPAIR)

    def _recovers(self, fault: TraceFault, changed: Callable[[int], None]) -> None:
        left = self.degraded[fault.node]
        left.remove(fault.slowdown)
        if not left:
            del self.degraded[fault.node]
        changed(fault.node)

    def slowdown(self, places: Collection[int]) -> float:
        """Return the fraction by which a task's steps take longer with these places: all wait for the slowest."""
        if not self.degraded:
            return 0.0
        cell = self.cluster.cell
        return max((max(found) for node, found in self.degraded.items() if node // cell in places), default=0.0)

    def place_is_up(self, place: int) -> bool:
        """Whether all nodes of a place can be used."""
        first = place * self.cluster.cell
        return not any(node in self.down for node in range(first, first + self.cluster.cell))

    def set(self, task: str, state: WorkerState, places: int, starting: int = 0, slowdown: float = 0.0) -> None:
        """Set a task's state from now on, its places, the number of places being started for it, and its slowdown."""
        self.meters[task].set(self.clock.now, state, places, starting, slowdown)
        assert self._held() + len(self.down) * self.cluster.workers_per_node <= self.cluster.num_workers

    def ends(self, task: str) -> None:
        """Record the end of a task."""
        self.meters[task].set(self.clock.now, "idle", 0)
        self._gone[task] = self.clock.now

    def result(self, policy: str) -> SimulationResult:
        """Return the result up to now."""
        end = self.clock.now
        self._settle_down()
        spent: Counter[WorkerState] = Counter(dict.fromkeys(STATES, 0))
        lost: dict[LossKind, float] = dict.fromkeys(LOSSES, 0.0)
        for name, meter in self.meters.items():
            if name not in self._gone:
                meter.settle(end)
            spent.update(meter.worker_micros)
            for why in LOSSES:
                lost[why] += meter.lost[why]
            lost["sub_healthy"] += self.ideal.waf[name].between(self._gone.get(name, end), end)
        spent["repairing"] = self._down_micros
        spent["idle"] += end * self.cluster.num_workers - spent.total()
        times, values = self._curve()
        incidents = [incident for name, meter in self.meters.items() for incident in meter.bills.all(name)]
        return SimulationResult(
            policy=policy,
            trace=self.trace.name,
            seconds=end / MICRO,
            times=times,
            values=values,
            ideal=self.ideal.total(end / MICRO),
            worker_micros=dict(spent),
            lost=dict(lost),
            tasks={name: self._task(name, meter, end) for name, meter in self.meters.items()},
            incidents=tuple(sorted(incidents, key=lambda incident: (incident.at, incident.task))),
            counts=dict(sorted(self.counts.items())),
        )

    def _task(self, name: str, meter: TaskMeter, end: int) -> TaskResult:
        begin, until = min(end, micros(meter.task.arrival)), self._gone.get(name, end)
        present, due = max(0, until - begin), self.ideal.waf[name].between(begin, until)
        return TaskResult(
            name=name,
            flops=meter.counted_flops,
            weight=meter.task.terms.weight,
            present=present / MICRO,
            steps=meter.position.frontier,
            worker_micros=dict(meter.worker_micros),
            goodput=meter.counted_flops * meter.task.terms.weight / due if due else 1.0,
            ettr=meter.counted_micros / present if present else 1.0,
        )

    def _curve(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the sum of the tasks' WAF over time."""
        changes_at = (at for meter in self.meters.values() for at, _ in meter.changes)
        moments = np.unique(np.array([0, *changes_at, *self._gone.values()], dtype=np.int64))
        moments = moments[moments < max(1, self.clock.now)]
        values = np.zeros(len(moments))
        for name, meter in self.meters.items():
            changes = [(-1, 0.0), *meter.changes]
            if name in self._gone:
                changes.append((self._gone[name], 0.0))
            at = np.array([moment for moment, _ in changes], dtype=np.int64)
            waf = np.array([value for _, value in changes])
            values += waf[np.searchsorted(at, moments, side="right") - 1]
        keep = np.append(True, np.diff(values) != 0)
        return moments[keep] / MICRO, values[keep]

    def _held(self) -> int:
        return sum(meter.places + meter.starting for meter in self.meters.values()) * self.cluster.place_workers

    def _settle_down(self) -> None:
        now = max(0, self.clock.now)
        self._down_micros += (now - self._down_since) * len(self.down) * self.cluster.workers_per_node
        self._down_since = now
