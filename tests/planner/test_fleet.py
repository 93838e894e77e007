"""Workers of several kinds: the plan equals the best of all kinds and sizes, which a plain method finds."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planner.situations import NAMES, cluster, shaped, states, task

from unicron_lightning.planner.fleet import Fleet, FleetPlan, Quota, QuotaTooSmall, _price, _Search, solve_fleet
from unicron_lightning.planner.reward import PlanTask
from unicron_lightning.planner.search.kinds import KindProblem, best_kinds
from unicron_lightning.planner.solver import solve
from unicron_lightning.planner.state import ClusterState, NodesJoined, TaskFinished, TaskLaunched, WorkersLost
from unicron_lightning.terms import Terms

Ways = dict[str, list[tuple[str, int, float, int]]]
"""Of each task: kind, workers, reward and moved units of each possibility."""


def fleet(
    tasks: Mapping[str, list[PlanTask]], num_workers: Mapping[str, int], seconds: float = 16.0, **rest: object
) -> Fleet:
    """Kinds with tasks; of ``rest`` each part is by kind."""
    states = {
        kind: cluster(own, num_workers[kind], reach=4, **{name: each.get(kind, {}) for name, each in rest.items()})
        for kind, own in tasks.items()
    }
    return Fleet(kinds=states, running_seconds=seconds)


@st.composite
def fleets(draw: st.DrawFn, *, pausing: bool = False) -> Fleet:
    """Up to five tasks with curves of any shape on two or three kinds; some run, and some of their workers are lost."""
    kinds = ["k0", "k1", "k2"][: draw(st.integers(2, 3))]
    num_workers = {kind: draw(st.integers(1, 5)) for kind in kinds}
    left, tasks = dict(num_workers), {kind: [] for kind in kinds}
    allocation, lost = {kind: {} for kind in kinds}, {kind: {} for kind in kinds}
    for name in NAMES[: draw(st.integers(1, 5))]:
        terms = {
            "weight": draw(st.sampled_from([0.5, 1.0, 2.0])),
            "min_workers": draw(st.integers(1, 3)),
            "granularity": draw(st.sampled_from([1, 1, 2])),
            "may_pause": pausing or draw(st.booleans()),
            "transition_seconds": draw(st.sampled_from([0.0, 1.0, 2.0])),
            "relayout_seconds": draw(st.sampled_from([0.0, 1.0, 4.0])),
        }
        able = draw(st.lists(st.sampled_from(kinds), min_size=1, unique=True))
        for kind in able:
            flops = st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0, 5.0, 8.0]), min_size=1, max_size=6)
            tasks[kind].append(task(name, (0.0, *draw(flops)), **terms))
        home = draw(st.sampled_from(able))
        has, gone = draw(st.integers(0, left[home])), draw(st.sampled_from([0, 0, 0, 1, 2]))
        left[home] -= has
        allocation[home][name] = has + gone
        if gone:
            lost[home][name] = gone
    return fleet(tasks, num_workers, allocation=allocation, lost=lost)


def ways(fleet: Fleet) -> Ways:
    """Every kind and size that each task may have, rewards from the definition of G."""
    found: Ways = {}
    for name, curves in fleet.tasks.items():
        home = fleet.homes.get(name)
        before = fleet.kinds[home].allocation[name] if home else 0
        lost = fleet.kinds[home].lost.get(name) if home else None
        one = next(iter(curves.values())).task
        was = curves[home].waf_at(before) if home else 0.0
        left = before - (lost or 0)
        own = []
        if one.terms.may_pause:
            own.append(("", 0, -was * one.transition_seconds if before else 0.0, left))
        for kind, curve in curves.items():
            sizes = [int(x) for x in curve.workers if x <= fleet.kinds[kind].num_workers]
            for x in sizes:
                reward = curve.waf_at(x) * fleet.duration_seconds
                if lost is not None or (kind, x) != (home, before):
                    reward -= was * one.transition_seconds
                if home not in (None, kind) or curve.is_relayout(before, x):
                    reward -= was * one.relayout_seconds
                own.append((kind, x, reward, abs(x - left) if kind == home else x + left))
        found[name] = own
    return found


def best(fleet: Fleet, found: Ways) -> tuple[float, int] | None:
    """The greatest reward with the fewest moves, over all kinds and sizes; None if the minimums do not fit."""
    reached: dict[tuple[int, ...], tuple[float, int]] = {(0,) * len(fleet.kinds): (0.0, 0)}
    for own in found.values():
        after: dict[tuple[int, ...], tuple[float, int]] = {}
        for used, (value, moved) in reached.items():
            for kind, x, reward, moves in own:
                now = tuple(num + x * (each == kind) for num, each in zip(used, fleet.kinds, strict=True))
                if all(num <= state.num_workers for num, state in zip(now, fleet.kinds.values(), strict=True)):
                    after[now] = max(after.get(now, (float("-inf"), 0)), (value + reward, moved - moves))
        reached = after
    return max(reached.values(), default=None)


def check(plan: FleetPlan) -> None:
    """The plan fits, and its figures are those of its parts."""
    fleet = plan.fleet
    for kind, state in fleet.kinds.items():
        assert sum(part.num_workers for part in plan.tasks if part.kind == kind) <= state.num_workers
    assert list(plan.allocation) == list(fleet.tasks)
    possible = ways(fleet)
    for part in plan.tasks:
        if part.name not in plan.infeasible:
            assert (part.kind if part.num_workers else "", part.num_workers) in {way[:2] for way in possible[part.name]}


@given(fleets())
@settings(max_examples=500, deadline=None)
def test_the_plan_equals_the_best_of_all_kinds_and_sizes(fleet: Fleet) -> None:
    plan, found = solve_fleet(fleet), ways(fleet)
    check(plan)
    assert plan.gap_flop == 0.0
    top = best(fleet, found)
    assert bool(plan.infeasible) == (top is None)
    if top is None:
        kept = {name: own for name, own in found.items() if name not in plan.infeasible}
        for name in plan.infeasible:
            was = sum(fleet.kinds[home].lost.get(name, 0) for home in (fleet.homes.get(name),) if home)
            kept[name] = [("", 0, *_paused(fleet, name, was))]
        assert worth_of_minimums(fleet, set(plan.infeasible)) == most_of_minimums(fleet)
        top = best(fleet, kept)
    assert (plan.value, -plan.num_moved_workers) == top


def _paused(fleet: Fleet, name: str, lost: int) -> tuple[float, int]:
    """Reward and moves of a task without workers."""
    home = fleet.homes.get(name)
    if home is None:
        return 0.0, 0
    curve, before = fleet.tasks[name][home], fleet.kinds[home].allocation[name]
    return -curve.waf_at(before) * curve.task.transition_seconds, before - lost


def minimums(fleet: Fleet) -> dict[str, list[tuple[str, int, float]]]:
    """Kind, workers and F of the minimum on each kind, of the tasks that may not be paused."""
    return {
        name: [
            (kind, int(curve.workers[0]), float(curve.waf[0]))
            for kind, curve in curves.items()
            if len(curve.workers) and curve.workers[0] <= fleet.kinds[kind].num_workers
        ]
        for name, curves in fleet.tasks.items()
        if not next(iter(curves.values())).task.terms.may_pause
    }


def worth_of_minimums(fleet: Fleet, paused: set[str]) -> tuple[float, int]:
    """The greatest F of the minimums of each task that runs; and how many of them ran before."""
    running = {name: own for name, own in minimums(fleet).items() if own and name not in paused}
    return sum(max(each[2] for each in own) for own in running.values()), len(running.keys() & fleet.homes.keys())


def most_of_minimums(fleet: Fleet) -> tuple[float, int]:
    """The greatest of any set of tasks whose minimums fit."""
    found, tasks = [], minimums(fleet)
    for chosen in itertools.product(*([None, *own] for own in tasks.values())):
        used = Counter(dict.fromkeys(fleet.kinds, 0))
        for each in filter(None, chosen):
            used[each[0]] += each[1]
        if all(used[kind] <= state.num_workers for kind, state in fleet.kinds.items()):
            paused = {name for name, each in zip(tasks, chosen, strict=True) if each is None}
            found.append(worth_of_minimums(fleet, paused))
    return max(found)


@given(states())
@settings(max_examples=60, deadline=None)
def test_with_one_kind_it_is_the_solvers_plan(state: ClusterState) -> None:
    only = Fleet(kinds={"": state}, running_seconds=state.running_seconds)
    plan = solve_fleet(only)
    assert plan.plans[""] == solve(state)
    assert (plan.value, plan.waf, plan.num_moved_workers) == (
        solve(state).value,
        solve(state).waf,
        solve(state).num_moved_workers,
    )
    loss = state.loss_of(next(iter(state.names)))
    if loss is not None:
        assert solve_fleet(only.after(loss)).plans[""] == solve(state.after(loss))


def several(kind: str, num_tasks: int, num_workers: int, seed: int) -> Fleet:
    """A cold start of tasks with curves of a shape on two kinds."""
    states = {name: shaped(kind, num_tasks, num_workers, 2 * seed + place, reach=2) for place, name in enumerate("ab")}
    tasks = zip(states["a"].tasks, states["b"].tasks, strict=True)
    same = tuple(
        replace(b, task=replace(b.task, terms=a.task.terms, transition_seconds=a.task.transition_seconds))
        for a, b in tasks
    )
    return Fleet(kinds={"a": states["a"], "b": replace(states["b"], tasks=same)}, running_seconds=1024.0)


@pytest.mark.parametrize("kind", ["concave", "stairs", "rising", "wild"])
def test_a_search_that_stops_early_states_how_far_the_best_may_be(kind: str) -> None:
    fleet = several(kind, 8, 20, seed=1)
    full = solve_fleet(fleet)
    assert full.gap_flop == 0.0
    search = _Search(fleet=fleet, price=_price(fleet), paused=())
    columns = [search.columns(name) for name in fleet.tasks]
    for most in (1, 2, 5):
        found = best_kinds(KindProblem(columns=columns, num_units=search.num_units), [0] * len(columns), most)
        best_total = best_kinds(KindProblem(columns=columns, num_units=search.num_units), [1] * len(columns)).total
        assert found.total <= best_total <= found.bound


def test_an_event_changes_one_kind_and_the_time_until_the_next_failure_of_all() -> None:
    steady = {kind: [task("a", [0, 1, 2, 3]), task("b", [0, 1, 2, 3])] for kind in ("k0", "k1")}
    states = {kind: cluster(own, 2, reach=2, queued=[task("c", [0, 9])]) for kind, own in steady.items()}
    first = Fleet(kinds=states, running_seconds=lambda n: 64.0 / n)
    assert first.duration_seconds == 16.0
    running = first.adopt(solve_fleet(first))
    assert running.homes == {"a": "k0", "b": "k1"}
    lost = running.after(WorkersLost(num_workers=1, by_task={"b": 1}), "k1")
    assert ([state.num_workers for state in lost.kinds.values()], lost.duration_seconds) == ([2, 1], 64 / 3)
    part = solve_fleet(lost).tasks[1]
    assert (part.num_workers, part.num_workers_lost, part.changed, part.kind) == (1, 1, True, "k1")
    joined = lost.after(NodesJoined(num_workers=1), "k1")
    assert solve_fleet(joined).allocation == {"a": 2, "b": 2}
    assert solve_fleet(joined.after(TaskFinished(task="a"))).allocation == {"b": 2}
    assert solve_fleet(running.after(TaskLaunched(task="c"))).allocation["c"] == 1


def test_a_change_of_kind_costs_a_restart_of_all_workers() -> None:
    """Twice as fast on the other kind: 10 more FLOP/s, once the restart of 10 * (2 + 6) FLOP has paid off."""
    for seconds, kind in ((7.0, "k0"), (9.0, "k1")):
        slow, fast = (task("a", [0, rate], transition_seconds=2.0, relayout_seconds=6.0) for rate in (10, 20))
        plan = solve_fleet(
            fleet({"k0": [slow], "k1": [fast]}, {"k0": 1, "k1": 1}, seconds, allocation={"k0": {"a": 1}})
        )
        (part,) = plan.tasks
        assert (part.kind, part.kind_before, part.relayout) == (kind, "k0", kind == "k1")
        assert plan.value == (10 * 7.0 if kind == "k0" else 20 * 9.0 - 10 * 8.0)
        assert plan.num_moved_workers == (0 if kind == "k0" else 2)


def quotas_of(draw: st.DrawFn, fleet: Fleet) -> tuple[Quota, ...]:
    """One or two quotas of tasks that can run on one kind only."""
    pools = [[name for name, curves in fleet.tasks.items() if list(curves) == [kind]] for kind in fleet.kinds]
    found = []
    for pool in pools:
        cut = draw(st.integers(0, len(pool)))
        for names in (pool[:cut], pool[cut:]):
            if names and draw(st.booleans()):
                guaranteed = draw(st.integers(0, 5))
                most = draw(st.one_of(st.none(), st.integers(guaranteed, 6)))
                found.append(Quota(name=names[0], tasks=tuple(names), guaranteed=guaranteed, most=most))
    return tuple(found)


@st.composite
def shared(draw: st.DrawFn) -> Fleet:
    given = draw(fleets(pausing=draw(st.booleans())))
    return replace(given, quotas=quotas_of(draw, given))


def every(fleet: Fleet, found: Ways) -> Iterator[tuple[tuple[float, int], dict[str, int]]]:
    """Reward, with moves, and workers by task of all plans that fit on each kind."""
    for chosen in itertools.product(*found.values()):
        used = Counter(dict.fromkeys(fleet.kinds, 0))
        for kind, x, _, _ in chosen:
            used[kind] += x
        if all(used[kind] <= state.num_workers for kind, state in fleet.kinds.items()):
            value = sum(way[2] for way in chosen), -sum(way[3] for way in chosen)
            yield value, dict(zip(found, (way[1] for way in chosen), strict=True))


def fewest(fleet: Fleet, found: Ways, quota: Quota) -> int | None:
    """The fewest workers with which a quota's tasks alone reach their best with what they are guaranteed."""
    own = {name: found[name] for name in quota.tasks}
    least = sum(min(way[1] for way in each) for each in own.values())
    reachable = [
        (value, -sum(workers.values()))
        for value, workers in every(fleet, own)
        if sum(workers.values()) <= max(least, quota.guaranteed) and sum(workers.values()) <= limit(quota)
    ]
    return -max(reachable)[1] if reachable else None


def limit(quota: Quota) -> float:
    return float("inf") if quota.most is None else quota.most


@given(shared())
@settings(max_examples=400, deadline=None)
def test_quotas_hold_and_the_plan_is_the_best_of_those_that_keep_them(fleet: Fleet) -> None:
    found = ways(fleet)
    assume(all(found.values()) and math.prod(map(len, found.values())) < 5000)
    floors = {quota: fewest(fleet, found, quota) for quota in fleet.quotas}
    kept = [
        value
        for value, workers in every(fleet, found)
        if all(
            num is not None and num <= sum(workers[name] for name in quota.tasks) <= limit(quota)
            for quota, num in floors.items()
        )
    ]
    try:
        plan = solve_fleet(fleet)
    except QuotaTooSmall:
        assert not kept
        return
    check(plan)
    for quota in fleet.quotas:
        assert plan.num_workers_of(quota) <= limit(quota)
    assume(kept and not plan.infeasible)
    if (plan.value, -plan.num_moved_workers) != max(kept):
        # Guarantees were cut, since they do not fit beside the minimums with the kinds that those were found to fit on.
        assert any(plan.num_workers_of(quota) < num for quota, num in floors.items())
        assert sum(not terms.may_pause for terms in _terms(fleet)) and len(fleet.kinds) > 1


def _terms(fleet: Fleet) -> list[Terms]:
    return [next(iter(curves.values())).task.terms for curves in fleet.tasks.values()]


def test_guarantees_that_do_not_fit_shrink_in_proportion() -> None:
    tasks = [task(name, range(13), weight=weight) for name, weight in (("a", 1.0), ("b", 1.0), ("c", 9.0))]
    quotas = (Quota(name="x", tasks=("a",), guaranteed=8), Quota(name="y", tasks=("b",), guaranteed=4))
    for num_workers, workers in ((12, (8, 4, 0)), (16, (8, 4, 4)), (9, (6, 3, 0)), (0, (0, 0, 0))):
        state = cluster(tasks, num_workers)
        plan = solve_fleet(Fleet(kinds={"": state}, running_seconds=16.0, quotas=quotas))
        assert tuple(plan.allocation.values()) == workers


def test_a_group_that_can_use_less_than_it_is_guaranteed_leaves_the_rest_to_others() -> None:
    tasks = [task("a", [0, 5, 5, 5], weight=1.0), task("b", range(9), weight=9.0)]
    quota = Quota(name="x", tasks=("a", "gone"), guaranteed=3, most=3)
    plan = solve_fleet(Fleet(kinds={"": cluster(tasks, 8)}, running_seconds=16.0, quotas=(quota,)))
    assert plan.allocation == {"a": 1, "b": 7}
