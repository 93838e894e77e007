"""The search is exact with poor bounds as with good ones; bounds only save time."""

from __future__ import annotations

import numpy as np
import pytest
from planner.situations import SHAPES, shaped

from unicron_lightning.planner.quantum import moves_factor
from unicron_lightning.planner.search import exact, kernels
from unicron_lightning.planner.search.exact import EVERYTHING, best_choices
from unicron_lightning.planner.search.options import NOTHING, Column
from unicron_lightning.planner.search.variants import SearchProblem, Variant
from unicron_lightning.planner.solver import columns_of


def problem_of(kind: str, seed: int) -> SearchProblem:
    """Variants of every sort: each column replaced by itself, each taken away."""
    state = shaped(kind, 7, 150, seed)
    columns = columns_of(state, (), moves_factor(state))
    variants = [Variant(position=i, replaces=True, column=each) for i, each in enumerate(columns)]
    variants += [Variant(position=i, replaces=True, column=NOTHING) for i in range(len(columns))]
    return SearchProblem.of(columns, 150, [*variants, _end(len(columns))])


def _end(position: int) -> Variant:
    return Variant(position=position, replaces=False, column=NOTHING)


def found(problem: SearchProblem) -> list[tuple[int, list[int]]]:
    return [(choice.key, choice.units.tolist()) for choice in best_choices(problem)]


@pytest.mark.parametrize("kind", SHAPES)
def test_without_bounds_the_same_is_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without exclusions: the plain dynamic program over all options."""
    problem = problem_of(kind, 1)
    expected = found(problem)
    count = len(problem.variants)
    monkeypatch.setattr(exact, "_bounds", lambda _: ([(-1, EVERYTHING)] * count, [EVERYTHING] * count))
    assert found(problem) == expected


@pytest.mark.parametrize("kind", SHAPES)
def test_a_guess_that_is_wrong_is_mended(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of the hulls' best options only yield no optimum, but a bound on its distance."""
    problem = problem_of(kind, 2)
    expected = found(problem)
    few = []

    def guess(problem: SearchProblem, prices: list, distances: list) -> tuple[list[int], np.ndarray]:
        limits = [0] * len(distances)
        mask = exact._mark(problem, prices, limits, EVERYTHING)
        few.append(int(mask.sum()))
        return limits, mask

    monkeypatch.setattr(exact, "_guess", guess)
    assert found(problem) == expected
    assert few[0] < len(problem.columns.units) or kind in ("linear", "holes")


def test_options_are_ruled_out() -> None:
    """Otherwise the search would be exact but slow."""
    problem = problem_of("concave", 3)
    prices, distances = exact._bounds(problem)
    _, mask = exact._guess(problem, prices, distances)
    assert mask.sum() < 0.1 * len(mask)


def test_a_price_that_64_bits_cannot_hold_is_none() -> None:
    units, keys = np.array([0, 1, 0]), np.array([0, 100, 0])
    starts = np.array([0, 2, 3])
    hull_starts, vertices = kernels.hulls(starts, units, keys)
    arguments = (hull_starts, vertices, units, keys, 1, -1, 1, 0)
    assert kernels.find_price(*arguments, 99)[0] == -1
    assert kernels.find_price(*arguments, 100) == (100, 0, 0)


def test_minimums_that_do_not_fit_are_a_mistake_of_the_caller() -> None:
    column = Column(units=np.array([5, 6]), keys=np.array([1, 2]))
    with pytest.raises(AssertionError, match="minimums of 10 units on 9"):
        SearchProblem.of([column, column], 9, [_end(2)])
