"""The search is exact with poor bounds as with good ones; bounds only save time."""

from __future__ import annotations

import numpy as np
import pytest
from planner.situations import SHAPES, shaped

from unicron_lightning.planner.quantum import move_price
from unicron_lightning.planner.search import exact, kernels
from unicron_lightning.planner.search.exact import EVERYTHING, best_choices
from unicron_lightning.planner.search.options import NOTHING, Column
from unicron_lightning.planner.search.variants import SearchProblem, Variant
from unicron_lightning.planner.solver import columns_of


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
    assert kernels.find_price(*arguments, 99, -1)[0] == -1
    assert kernels.find_price(*arguments, 100, -1) == (100, 0, 0)


@pytest.mark.parametrize("kind", SHAPES)
def test_a_guess_does_not_change_the_price(kind: str) -> None:
    problem = problem_of(kind, 4)
    columns, most = problem.columns, (1 << 62) // (problem.free_units + 1)
    hull = (problem.hull_starts, problem.vertices, columns.units, columns.keys)
    for index in range(len(problem.variants)):
        numbers = (problem.num_tasks, problem.skipped(index), problem.num_tasks + index, problem.num_units, most)
        right = kernels.find_price(*hull, *numbers, -1)
        assert right[1] >= right[2] and right[0] >= 0
        for guess in (0, 1, right[0] // 2, right[0] - 1, right[0], right[0] + 1, 3 * right[0], most - 1, most):
            assert kernels.find_price(*hull, *numbers, guess) == right, guess


@pytest.mark.parametrize("kind", SHAPES)
def test_options_in_reach_of_any_variant_are_kept(kind: str) -> None:
    """What is removed for all variants at once would be marked for none of them."""
    problem = problem_of(kind, 5)
    prices, distances = exact._bounds(problem)
    mask = exact._mark(problem, prices, distances, EVERYTHING)
    fewer = exact._without_hopeless(problem, prices, distances)
    assert mask.sum() <= len(fewer.columns.units)
    again = exact._mark(fewer, prices, distances, EVERYTHING)
    for task in range(len(problem.columns)):
        kept, marked = (
            each.columns.units[slice(*each.columns.starts[task : task + 2])][
                which[slice(*each.columns.starts[task : task + 2])]
            ]
            for each, which in ((fewer, again), (problem, mask))
        )
        assert kept.tolist() == marked.tolist()


def test_minimums_that_do_not_fit_are_a_mistake_of_the_caller() -> None:
    column = Column(units=np.array([5, 6]), keys=np.array([1, 2]))
    with pytest.raises(AssertionError, match="minimums of 10 units on 9"):
        SearchProblem.of([column, column], 9, [_end(2)])
