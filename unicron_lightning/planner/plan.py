"""A plan: the workers of each task, their value, and the value of a little more or less."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from unicron_lightning.planner.performance.model import ParallelConfiguration
    from unicron_lightning.planner.reward import Curve
    from unicron_lightning.planner.state import ClusterState


@dataclass(frozen=True, kw_only=True)
class TaskPlan:
    """One task's part of a plan.

    Attributes:
        name: of the task.
        num_workers: x', planned workers; 0 if the task is paused.
        num_workers_before: x, workers before, including lost ones.
        num_workers_lost: number of failed workers among them.
        changed: whether the task goes through a transition: it is affected, or x' differs from x.
        relayout: whether the change is to another TP x PP.
        waf: F(t,x') [FLOP/s].
        reward: G(t,x') [FLOP].
        configuration: distribution over its workers; None if the performance model does not know it.
        gain_of_last: G less that of the next smaller size [FLOP]; None if no smaller size exists.
        gain_of_next: G of the next larger size, for this task alone, less G [FLOP]; None if no larger size exists.
    """

    name: str
    num_workers: int
    num_workers_before: int
    num_workers_lost: int
    changed: bool
    relayout: bool
    waf: float
    reward: float
    configuration: ParallelConfiguration | None
    gain_of_last: float | None
    gain_of_next: float | None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The best allocation in a state.

    Attributes:
        state: the planned situation; ignored when plans are compared.
        names: the tasks, sorted.
        workers: x' of each.
        infeasible: tasks that are paused although they may not be, because the minimums of all such tasks do not fit.
    """

    state: ClusterState = field(compare=False, repr=False)
    names: tuple[str, ...]
    workers: tuple[int, ...]
    infeasible: tuple[str, ...] = ()

    @cached_property
    def allocation(self) -> Mapping[str, int]:
        """Workers by task, x', 0 for paused tasks."""
        return MappingProxyType(dict(zip(self.names, self.workers, strict=True)))

    @property
    def paused(self) -> tuple[str, ...]:
        """Tasks without workers."""
        return tuple(name for name, x in zip(self.names, self.workers, strict=True) if not x)

    @cached_property
    def value(self) -> float:
        """The maximised quantity: the sum of G(t,x') [FLOP]."""
        return math.fsum(reward_of(self.state, *pair) for pair in zip(self.state.tasks, self.workers, strict=True))

    @cached_property
    def waf(self) -> float:
        """The sum of F(t,x') [FLOP/s]."""
        return math.fsum(curve.waf_at(x) for curve, x in zip(self.state.tasks, self.workers, strict=True))

    @property
    def num_spare_workers(self) -> int:
        """Healthy workers without a task."""
        return self.state.num_workers - sum(self.workers)

    @cached_property
    def num_moved_workers(self) -> int:
        """Workers that tasks get or release: the sum of abs(x' - workers that the task still has)."""
        allocation, lost = self.state.allocation, self.state.lost
        left = (allocation.get(name, 0) - lost.get(name, 0) for name in self.names)
        return sum(abs(x - has) for x, has in zip(self.workers, left, strict=True))

    @cached_property
    def tasks(self) -> tuple[TaskPlan, ...]:
        """Details of each task."""
        return tuple(self._task(curve, x) for curve, x in zip(self.state.tasks, self.workers, strict=True))

    def _task(self, curve: Curve, num_workers: int) -> TaskPlan:
        state, name = self.state, curve.task.name
        here = reward_of(state, curve, num_workers)
        smaller, larger = neighbours(state, curve, num_workers)
        return TaskPlan(
            name=name,
            num_workers=num_workers,
            num_workers_before=state.allocation.get(name, 0),
            num_workers_lost=state.lost.get(name, 0),
            changed=is_changed(state, curve, num_workers),
            relayout=curve.is_relayout(state.allocation.get(name, 0), num_workers),
            waf=curve.waf_at(num_workers),
            reward=here,
            configuration=curve.task.performance.configuration(num_workers) if num_workers else None,
            gain_of_last=None if smaller is None else here - reward_of(state, curve, smaller),
            gain_of_next=None if larger is None else reward_of(state, curve, larger) - here,
        )


def is_changed(state: ClusterState, curve: Curve, num_workers: int) -> bool:
    """Whether a task with ``num_workers`` goes through a transition: [t is affected, or x' != x]."""
    name = curve.task.name
    return name in state.lost or num_workers != state.allocation.get(name, 0)


def reward_of(state: ClusterState, curve: Curve, num_workers: int) -> float:
    """G(t,x') [FLOP] in a state, see `unicron_lightning.planner.reward`."""
    before, task = state.allocation.get(curve.task.name, 0), curve.task
    seconds = task.longest_seconds if curve.is_relayout(before, num_workers) else task.transition_seconds
    lost = curve.waf_at(before) * seconds if is_changed(state, curve, num_workers) else 0.0
    return curve.waf_at(num_workers) * state.duration_seconds - lost


def neighbours(state: ClusterState, curve: Curve, num_workers: int) -> tuple[int | None, int | None]:
    """The next smaller and the next larger possible number of workers of the task, None where none exists.

    A task that may be paused has 0 as its smallest size.
    """
    below = int(np.searchsorted(curve.workers, num_workers))
    above = int(np.searchsorted(curve.workers, num_workers, side="right"))
    smaller = int(curve.workers[below - 1]) if below else None
    if smaller is None and num_workers and curve.task.terms.may_pause:
        smaller = 0
    larger = int(curve.workers[above]) if above < len(curve.workers) else None
    return smaller, larger if larger is not None and larger <= state.num_workers else None
