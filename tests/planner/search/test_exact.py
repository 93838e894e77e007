"""The search is exact with poor bounds as with good ones; bounds only save time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from planner.situations import SHAPES, every_plan, merit, shaped, states

from unicron_lightning.planner.search import exact
from unicron_lightning.planner.search.exact import NOTHING, Column, SearchProblem, Variant, best_choices, reduced_costs
from unicron_lightning.planner.solver import columns_of
from unicron_lightning.planner.state import ClusterState, move_price


def problem_of(kind: str, seed: int) -> SearchProblem:
    """Variants of every sort: each column replaced by itself, each taken away."""
    state = shaped(kind, 7, 150, seed)
    columns = columns_of(state, (), move_price(state))
    variants = [Variant(position=i, replaces=True, column=each) for i, each in enumerate(columns)]
    variants += [Variant(position=i, replaces=True, column=NOTHING) for i in range(len(columns))]
    return SearchProblem.of(columns, 150, [*variants, _end(len(columns))])


def _end(position: int) -> Variant:
    return Variant(position=position, replaces=False, column=NOTHING)


def found(problem: SearchProblem) -> list[tuple[int, list[int]]]:
    return [(key, units.tolist()) for key, units in best_choices(problem)]


@pytest.mark.parametrize("kind", SHAPES)
def test_without_bounds_the_same_is_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without exclusions: the plain dynamic program over all options."""
    problem = problem_of(kind, 1)
    expected = found(problem)
    monkeypatch.setattr(exact, "_guess", lambda *_: 1 << 62)
    assert found(problem) == expected


@pytest.mark.parametrize("kind", SHAPES)
def test_a_guess_that_is_wrong_is_mended(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of the options with the least reduced costs only yield no optimum, but a bound on its distance."""
    problem = problem_of(kind, 2)
    expected = found(problem)
    few = []

    def core(problem: SearchProblem, reduced: np.ndarray, limit: int) -> object:
        made = original(problem, reduced, limit)
        few.append(len(made.units))
        return made

    original = exact._core
    monkeypatch.setattr(exact, "_guess", lambda *_: 0)
    monkeypatch.setattr(exact, "_core", core)
    assert found(problem) == expected
    assert (len(few) == 2 and few[0] < few[1]) or kind in ("linear", "holes")


@pytest.mark.parametrize("kind", SHAPES)
def test_variants_far_from_the_shared_price_are_solved_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(kind, 5)
    expected, alone = found(problem), []
    original = SearchProblem.alone
    monkeypatch.setattr(exact, "_guess", lambda *_: 0)
    monkeypatch.setattr(exact, "MANY_OPTIONS", 0)
    monkeypatch.setattr(SearchProblem, "alone", lambda self, index: alone.append(index) or original(self, index))
    assert found(problem) == expected
    assert alone or kind in ("linear", "holes")


def test_options_are_ruled_out() -> None:
    """Otherwise the search would be exact but slow."""
    problem = problem_of("concave", 3)
    reduced, bounds = reduced_costs(problem)
    worst = max(bound - key for bound, (key, _) in zip(bounds, found(problem), strict=True))
    assert (reduced <= worst).mean() < 0.5
    alone = bounds[-1] - found(problem)[-1][0]
    assert (reduced <= alone).mean() < 0.1


@pytest.mark.parametrize("kind", SHAPES)
def test_no_other_price_gives_a_closer_bound(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(kind, 4)
    prices = []
    original = exact._price
    monkeypatch.setattr(exact, "_price", lambda *given: prices.append(original(*given)) or prices[-1])
    closest = reduced_costs(problem)[1][-1]
    for other in (0, prices[0] // 2, prices[0] - 1, prices[0] + 1, 3 * prices[0]):
        monkeypatch.setattr(exact, "_price", lambda *_, other=other: max(0, other))
        # A whole price is less than 1 from the best one, so that no unit is counted wrongly by more than that.
        assert reduced_costs(problem)[1][-1] >= closest - len(problem.columns.units)


@given(states())
@settings(max_examples=200, deadline=None)
def test_no_option_of_a_best_plan_is_ruled_out(state: ClusterState) -> None:
    """The bound holds for every plan, and the reduced cost of each of its options fits between bound and plan."""
    plans = list(every_plan(state))
    if not plans:
        return
    columns = columns_of(state, (), move_price(state))
    whole = Variant(position=len(columns) - 1, replaces=True, column=columns[-1])
    problem = SearchProblem.of(columns, state.num_workers // state.unit, [whole])
    reduced, (bound,) = reduced_costs(problem)
    assert reduced.min() >= 0
    top = max(merit(plan) for plan in plans)
    for plan in plans:
        if merit(plan) != top:
            continue
        chosen = []
        for index, workers in enumerate(plan.workers):
            column = len(plan.workers) if index == len(plan.workers) - 1 else index
            first, end = problem.columns.starts[column : column + 2]
            chosen.append(first + int(np.searchsorted(problem.columns.units[first:end], workers // state.unit)))
            assert problem.columns.units[chosen[-1]] == workers // state.unit
        key = int(problem.columns.keys[chosen].sum())
        assert reduced[chosen].sum() <= bound - key


def test_minimums_that_do_not_fit_are_a_mistake_of_the_caller() -> None:
    column = Column(units=np.array([5, 6]), keys=np.array([1, 2]))
    with pytest.raises(AssertionError, match="minimums of 10 units on 9"):
        SearchProblem.of([column, column], 9, [_end(2)])
