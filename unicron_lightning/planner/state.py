"""The situation that a plan is made for: tasks, workers, the current allocation, and the possible next events.

**Resolution of rewards, and the price of a move.** Rewards are rounded to whole multiples of a quantum, so that sums
are exact in any order: ties are exact, the order of tasks has no effect, and a plan made ahead equals the plan that
would be made later. The solver maximises a sum of *keys*, 64-bit integers:

    key = round(G / quantum)  -  c * moved units,      c > the difference between the rounded rewards of equal plans

F * D_running is rounded by its *increments* from size to size (`search.exact.keys_of`), by at most 0.75 quanta each,
which keeps concave stretches concave. The rounding error of a plan of n' units on m tasks is hence below 0.75 n' + 0.75
m quanta. Rewards that are equal as real numbers can differ by as much again in floating point, by a quantum for each
task. So among plans of equal reward the one that moves fewest units has the greatest key. In return a plan that moves
one unit less is preferred to one whose reward is up to c quanta greater, about 1e-16 (4 n' + 8 m) of the largest
possible reward: 2e-12 for 6 tasks on 128 units, 6e-11 for 256 tasks on 12,500.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

from unicron_lightning.planner.reward import Curve


@dataclass(frozen=True, kw_only=True)
class WorkersLost:
    """Workers fail.

    Attributes:
        num_workers: number of failed workers, idle ones included.
        by_task: number of failed workers of each affected task, by name; given as a mapping or as pairs.

    Raises:
        ValueError: a number is not positive, or the tasks lose more workers than fail.
    """

    num_workers: int
    by_task: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        pairs = self.by_task.items() if isinstance(self.by_task, Mapping) else self.by_task
        object.__setattr__(self, "by_task", tuple(sorted(pairs)))
        lost = [number for _, number in self.by_task]
        if self.num_workers < 1 or any(number < 1 for number in lost):
            raise ValueError(f"{self!r}: expected at least one lost worker, and one of each named task")
        if sum(lost) > self.num_workers:
            raise ValueError(f"{self!r}: the tasks lose {sum(lost)} workers, expected at most {self.num_workers}")
        if len(dict(self.by_task)) != len(self.by_task):
            raise ValueError(f"{self!r}: expected each task once")


@dataclass(frozen=True, kw_only=True)
class NodesJoined:
    """``num_workers`` workers are added.

    Raises:
        ValueError: the number is below one.
    """

    num_workers: int

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ValueError(f"num_workers={self.num_workers!r}: expected at least 1")


@dataclass(frozen=True, kw_only=True)
class TaskFinished:
    """The running task ``task`` ends and frees its workers."""

    task: str


@dataclass(frozen=True, kw_only=True)
class TaskLaunched:
    """The queued task ``task`` is to run."""

    task: str


Event = WorkersLost | NodesJoined | TaskFinished | TaskLaunched


REWARD_BITS = 51
"""Number of bits of any sum of rewards in quanta: floating point is accurate to a quarter of a quantum up to here."""


def move_price(state: ClusterState) -> int:
    """c: quanta that a moved unit costs, a power of two above the difference that rounding makes."""
    num_tasks = len(state.tasks) + len(state.queued)
    return 1 << (2 * (state.num_workers // state.unit) + 4 * num_tasks).bit_length()


def choose(state: ClusterState) -> float:
    """The quantum [FLOP]: the given one if it is large enough, else the smallest that leaves room for a doubling.

    A state derived from another keeps its quantum, so that their plans can be compared.
    """
    curves = (*state.tasks, *state.queued)
    per_unit = max((curve.waf_per_unit for curve in curves), default=0.0)
    waf = min(per_unit * (state.num_workers / state.unit), math.fsum(curve.waf_peak for curve in curves))
    had = ((curve, state.allocation.get(curve.task.name, 0)) for curve in state.tasks)
    lost = math.fsum(curve.waf_at(x) * curve.task.longest_seconds for curve, x in had if x)
    largest = waf * state.duration_seconds + lost
    if largest <= 0.0:
        return state.quantum_flop or 1.0
    needed = math.ldexp(1.0, math.frexp(largest)[1] - REWARD_BITS)
    return state.quantum_flop if state.quantum_flop >= needed else 2 * needed


@dataclass(frozen=True, eq=False, kw_only=True)
class ClusterState:
    """n' healthy workers, the tasks that compete for them, and the current allocation.

    The order in which tasks are given does not matter. Equal contents have equal fingerprints, and a plan depends on
    nothing else.

    Attributes:
        tasks: F(t,x) of each task that is to run.
        num_workers: n', the number of healthy workers.
        running_seconds: D_running(n'), the expected seconds to the next failure with n' workers; a number if
            independent of n'. Its results must not change while the state is used: a new estimate needs a new state.
        allocation: x_i, each task's workers by its last plan; 0 for tasks that are not named.
        lost: number of failed workers since then, by task. A named task is *affected*, even with 0.
        queued: F(t,x) of tasks that are not to run yet. They matter only to the plans made ahead.
        unit: workers per unit of the plan, which gives each task a multiple of this.
        node_workers: workers of a node, which fail or join together in the plans made ahead. Default: the unit.
        pivot: task of the last event. It decides between plans that are equally good and move equally many workers, see
            `unicron_lightning.planner.solver`.
        quantum_flop: rewards are rounded to multiples of this [FLOP]; default: see `unicron_lightning.planner.state`.

    Raises:
        ValueError: names are not unique or unknown, a number is out of range, or a curve is for another unit or for
            fewer workers than needed.
    """

    tasks: tuple[Curve, ...]
    num_workers: int
    running_seconds: Callable[[int], float] | float
    allocation: Mapping[str, int] = field(default_factory=dict)
    lost: Mapping[str, int] = field(default_factory=dict)
    queued: tuple[Curve, ...] = ()
    unit: int = 1
    node_workers: int = 0
    pivot: str | None = None
    quantum_flop: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks", tuple(sorted(self.tasks, key=_name)))
        object.__setattr__(self, "queued", tuple(sorted(self.queued, key=_name)))
        running = {name: x for name, x in sorted(self.allocation.items()) if x}
        object.__setattr__(self, "allocation", MappingProxyType(running))
        object.__setattr__(self, "lost", MappingProxyType(dict(sorted(self.lost.items()))))
        if not self.node_workers:
            object.__setattr__(self, "node_workers", self.unit)
        self._check_numbers()
        self._check_names()
        if not 0 < self.duration_seconds < math.inf:
            given = f"running_seconds({self.num_workers}) is {self.duration_seconds!r}"
            raise ValueError(f"{given}: expected seconds, positive and finite")
        object.__setattr__(self, "quantum_flop", choose(self))

    def _check_numbers(self) -> None:
        for name, value, least in (
            ("num_workers", self.num_workers, 0),
            ("unit", self.unit, 1),
            ("node_workers", self.node_workers, 1),
            ("quantum_flop", self.quantum_flop, 0),
        ):
            if value < least:
                raise ValueError(f"{name}={value!r}: expected at least {least}")
        for curve in (*self.tasks, *self.queued):
            most = curve.task.terms.max_workers
            wanted = self.num_workers if most is None else min(self.num_workers, most)
            if curve.unit != self.unit or curve.num_workers < wanted:
                given = f"the curve of {curve.task.name!r} is for units of {curve.unit} and {curve.num_workers} workers"
                raise ValueError(f"{given}: expected units of {self.unit} and at least {wanted} workers")

    def _check_names(self) -> None:
        names = [curve.task.name for curve in (*self.tasks, *self.queued)]
        if len(set(names)) < len(names):
            raise ValueError(f"tasks {sorted(names)}: expected different names")
        known = {curve.task.name for curve in self.tasks}
        for what, given in (("allocation", self.allocation), ("lost", self.lost)):
            if not given.keys() <= known:
                raise ValueError(f"{what} names {sorted(given.keys() - known)}: expected only tasks {sorted(known)}")
            if any(number < 0 for number in given.values()):
                raise ValueError(f"{what}={dict(given)!r}: expected numbers of workers, 0 or more")
        for name, number in self.lost.items():
            if number > self.allocation.get(name, 0):
                raise ValueError(f"{name!r} lost {number} workers: expected at most {self.allocation.get(name, 0)}")
        if (used := sum(self.allocation.values()) - sum(self.lost.values())) > self.num_workers:
            raise ValueError(f"num_workers={self.num_workers}: expected at least the {used} that tasks have")

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The tasks' names, in the order in which everything is computed."""
        return tuple(curve.task.name for curve in self.tasks)

    @cached_property
    def duration_seconds(self) -> float:
        """D_running(n')."""
        return self.running_seconds_with(self.num_workers)

    def running_seconds_with(self, num_workers: int) -> float:
        """D_running of another number of workers; of one worker if the number is 0."""
        if callable(self.running_seconds):
            return float(self.running_seconds(max(1, num_workers)))
        return float(self.running_seconds)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the contents, including those that matter only to plans made ahead; equal only for equal states."""
        sizes = (self.num_workers, self.num_workers - self.node_workers, self.num_workers + self.node_workers)
        durations = [self.running_seconds_with(n) for n in sizes]
        numbers = (self.num_workers, self.unit, self.node_workers, self.pivot, self.quantum_flop, durations)
        standing = (tuple(self.allocation.items()), tuple(self.lost.items()), len(self.tasks))
        content = hashlib.blake2b(repr((numbers, standing)).encode(), digest_size=16)
        for curve in (*self.tasks, *self.queued):
            content.update(curve.digest)
        for curve in self.tasks:
            content.update(repr(curve.waf_at(self.allocation.get(curve.task.name, 0))).encode())
        return content.hexdigest()

    def after(self, event: Event) -> ClusterState:
        """The state in which the next plan is made if ``event`` happens now.

        Raises:
            ValueError: the event cannot happen in this state.
        """
        change = dataclasses.replace
        match event:
            case WorkersLost():
                lost = {name: number + self.lost.get(name, 0) for name, number in event.by_task}
                left = self.num_workers - event.num_workers
                pivot = event.by_task[0][0] if event.by_task else None
                return change(self, num_workers=left, lost={**self.lost, **lost}, pivot=pivot)
            case NodesJoined():
                return change(self, num_workers=self.num_workers + event.num_workers, pivot=None)
            case TaskFinished():
                return self._without(event.task)
            case TaskLaunched():
                coming = [curve for curve in self.queued if curve.task.name == event.task]
                if not coming:
                    raise ValueError(f"{event!r}: expected a queued task, one of {[c.task.name for c in self.queued]}")
                queued = tuple(curve for curve in self.queued if curve not in coming)
                return change(self, tasks=(*self.tasks, *coming), queued=queued, pivot=event.task)

    def _without(self, name: str) -> ClusterState:
        if name not in self.names:
            raise ValueError(f"{TaskFinished(task=name)!r}: expected one of the tasks {list(self.names)}")
        return dataclasses.replace(
            self,
            tasks=tuple(curve for curve in self.tasks if curve.task.name != name),
            allocation={task: x for task, x in self.allocation.items() if task != name},
            lost={task: x for task, x in self.lost.items() if task != name},
            pivot=name,
        )

    def adopt(self, allocation: Mapping[str, int]) -> ClusterState:
        """The state after a plan's ``allocation`` has been put into force."""
        return dataclasses.replace(self, allocation=allocation, lost={}, pivot=None)

    @cached_property
    def num_idle(self) -> int:
        """Healthy workers without a task."""
        return self.num_workers - sum(self.allocation.values()) + sum(self.lost.values())

    def loss_of(self, name: str | None) -> WorkersLost | None:
        """The loss of a node of ``name``, as planned ahead (None: of a node with idle workers only).

        A task that has fewer workers than a node loses all of them, and idle workers, if any, fail with them.

        Returns:
            None if no worker can be lost.
        """
        if name is None:
            return WorkersLost(num_workers=min(self.node_workers, self.num_idle)) if self.num_idle else None
        has = self.allocation.get(name, 0) - self.lost.get(name, 0)
        lost = min(has, self.node_workers)
        idle = min(self.num_idle, self.node_workers - lost)
        return WorkersLost(num_workers=lost + idle, by_task=((name, lost),)) if lost else None


def _name(curve: Curve) -> str:
    return curve.task.name
