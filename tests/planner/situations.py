"""Situations to plan for, and slow, simple methods to find the best plan."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from unicron_lightning.planner.performance.model import ParallelConfiguration
from unicron_lightning.planner.reward import Curve, PlanTask
from unicron_lightning.planner.solver import Plan, reward_of
from unicron_lightning.planner.state import ClusterState
from unicron_lightning.terms import Terms

NAMES = ("ada", "bo", "cy", "dee", "eve", "flo", "gus", "hal")


@dataclass(frozen=True)
class Given:
    """T(t,x) as a given table; the last value holds beyond it."""

    flops: tuple[float, ...]

    def throughput(self, num_workers: int) -> float:
        return self.flops[min(num_workers, len(self.flops) - 1)] if num_workers else 0.0

    def configuration(self, num_workers: int) -> ParallelConfiguration | None:
        if not self.throughput(num_workers):
            return None
        return ParallelConfiguration(
            tensor_parallel=1, pipeline_parallel=1, data_parallel=num_workers, micro_batch_size=1
        )

    def uncertainty(self, num_workers: int) -> float:
        return 0.0


def task(name: str, flops: Sequence[float], **rest: object) -> PlanTask:
    """A task that achieves ``flops[x]`` on x workers; of ``rest``, the names of terms are its terms."""
    terms = Terms(**{each.name: rest.pop(each.name) for each in dataclasses.fields(Terms) if each.name in rest})
    given = {"name": name, "performance": Given(tuple(flops)), "transition_seconds": 1.0, "terms": terms}
    return PlanTask(**given | rest)


def cluster(tasks: Sequence[PlanTask], num_workers: int, reach: int = 0, **rest: object) -> ClusterState:
    """A state in which ``tasks`` compete for workers; curves reach ``reach`` workers further than needed."""
    unit = rest.get("unit", 1)
    queued = tuple(Curve.of(each, unit, num_workers + reach) for each in rest.pop("queued", ()))
    curves = tuple(Curve.of(each, unit, num_workers + reach) for each in tasks)
    return ClusterState(**{"running_seconds": 10.0} | rest, tasks=curves, queued=queued, num_workers=num_workers)


def options(state: ClusterState, curve: Curve) -> list[int]:
    """Every number of workers that a task may have."""
    sizes = [int(x) for x in curve.workers if x <= state.num_workers]
    return [0, *sizes] if curve.task.terms.may_pause else sizes


def every_plan(state: ClusterState) -> Iterator[Plan]:
    """All plans that fit, one by one."""
    for workers in itertools.product(*(options(state, curve) for curve in state.tasks)):
        if sum(workers) <= state.num_workers:
            yield Plan(state=state, names=state.names, workers=workers)


def merit(plan: Plan) -> tuple[float, int]:
    """Sort key of the best plan; values of plans in these tests are exact in binary, or far apart."""
    state = plan.state
    moved = (abs(x - state.allocation.get(name, 0) + state.lost.get(name, 0)) for name, x in plan.allocation.items())
    return plan.value, -sum(-(-workers // state.unit) for workers in moved)


def plain_best(state: ClusterState) -> float:
    """The value of the best plan by the paper's recursion, in floating point."""
    best = np.zeros(state.num_workers + 1)
    for curve in state.tasks:
        new = np.full(state.num_workers + 1, -np.inf)
        for k in options(state, curve):
            np.maximum(new[k:], best[: len(best) - k] + reward_of(state, curve, k), out=new[k:])
        best = new
    return float(best[-1])


@st.composite
def states(draw: st.DrawFn, *, most_tasks: int = 4, most_workers: int = 9, queued: int = 0) -> ClusterState:
    """Small states full of ties: few different values, stairs, holes, limits, and an allocation to start from."""
    total = draw(st.integers(1, most_workers))
    unit = draw(st.sampled_from([1, 1, 1, 2]))
    names = draw(st.permutations(NAMES))[: draw(st.integers(1, most_tasks)) + queued]
    flops = st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0, 5.0, 8.0]), min_size=1, max_size=total + 5)
    tasks = []
    for name in names:
        least = draw(st.integers(1, 3))
        tasks.append(
            task(
                name,
                (0.0, *draw(flops)),
                weight=draw(st.sampled_from([0.5, 1.0, 2.0])),
                transition_seconds=draw(st.sampled_from([0.0, 1.0, 2.0])),
                min_workers=least,
                max_workers=draw(st.sampled_from([None, None, least + 2])),
                granularity=draw(st.sampled_from([1, 1, 2])),
                may_pause=draw(st.booleans()),
            )
        )
    allocation, left = {}, total
    for name in names[queued:]:
        allocation[name] = draw(st.integers(0, left))
        left -= allocation[name]
    return cluster(
        tasks[queued:],
        total,
        reach=4,
        queued=tasks[:queued],
        allocation=allocation,
        unit=unit,
        node_workers=draw(st.sampled_from([1, 2, 4])),
        running_seconds=draw(st.sampled_from([3.0, 16.0, _falling])),
    )


@st.composite
def tied(draw: st.DrawFn) -> ClusterState:
    """States in which changes cost nothing, and many plans have equal rewards."""
    total = draw(st.integers(2, 8))
    tasks, allocation, left = [], {}, total
    for name in NAMES[: draw(st.integers(2, 4))]:
        gains = draw(st.lists(st.integers(0, 3), min_size=1, max_size=total))
        tasks.append(task(name, np.cumsum([0.0, *gains]).tolist(), transition_seconds=0.0))
        allocation[name] = draw(st.integers(0, left))
        left -= allocation[name]
    return cluster(tasks, total, allocation=allocation, running_seconds=draw(st.sampled_from([1.0, 3.0, 7.0])))


def scaled(state: ClusterState, factor: float) -> ClusterState:
    """The state with every F(t,x) multiplied: the same plans are the best, but sums are no longer exact in binary."""
    curves = []
    for curve in state.tasks:
        flops = tuple(factor * each for each in curve.task.performance.flops)
        changed = dataclasses.replace(curve.task, performance=Given(flops))
        curves.append(Curve.of(changed, curve.unit, curve.num_workers))
    return dataclasses.replace(state, tasks=tuple(curves), queued=(), quantum_flop=0.0)


def _falling(num_workers: int) -> float:
    """D_running as in the paper: it falls as 1/n'; a power of two, so that sums are exact."""
    return 2.0 ** (5 - num_workers.bit_length())


def shape(kind: str, num_workers: int, random: np.random.Generator) -> np.ndarray:
    """A T(t,x) of a kind for x = 0 to ``num_workers``: similar to measured or modelled curves, and worse ones."""
    x = np.arange(num_workers + 1, dtype=float)
    scale = random.uniform(0.5, 2.0) * 2e14
    bend = num_workers * random.uniform(0.02, 0.5)
    step = int(random.choice([1, 2, 4, 8, 16]))
    match kind:
        case "concave":
            return scale * x / (1 + x / bend)
        case "linear":  # the same for all tasks: all allocations are equally good
            return 2e14 * x
        case "stairs":
            bumps = random.uniform(0.9, 1.0, len(x))
            return scale * (x // step * step) / (1 + x / bend) * bumps
        case "holes":  # linear, at sizes where the task can run
            return 2e14 * x * (random.random(len(x)) < 0.5)
        case "rising":
            return scale * num_workers * np.sort(np.append(0.0, random.random(num_workers)))
        case "wild":
            return scale * num_workers * np.append(0.0, random.random(num_workers))
    raise AssertionError(kind)


SHAPES = ("concave", "linear", "stairs", "holes", "rising", "wild")


def shaped(kind: str, num_tasks: int, num_workers: int, seed: int, reach: int = 1, **rest: object) -> ClusterState:
    """A cold start of tasks with curves of a kind."""
    random = np.random.default_rng(seed)
    tasks = [
        task(
            f"t{number:03}",
            shape(kind, num_workers + reach, random).tolist(),
            weight=1.0 if kind in ("linear", "holes") else float(random.choice([0.5, 1.0, 2.0, 3.0])),
            transition_seconds=float(random.choice([30.0, 60.0, 120.0])),
            may_pause=bool(random.random() < 0.7),
        )
        for number in range(num_tasks)
    ]
    return cluster(tasks, num_workers, reach=reach, running_seconds=lambda n: 3.6e6 / n, **rest)
