"""The exact search: the best choice of one option per task, for several variants of one problem at once.

A *variant* changes one column: it replaces a task's options, removes a task or inserts one. All variants share the
prefix and the suffix table of the other columns; each then needs one combination of a prefix row, its own column and a
suffix row instead of a solution of its own.

Only options that can be in a best plan of some variant enter the tables (`search.kernels`). The
first tables use a guess of the distance between bound and optimum. The resulting plans bound this distance; if the
guess was too small, the tables are made again with the bound. Ties are never removed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from unicron_lightning.planner.search import kernels
from unicron_lightning.planner.search.tables import Rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from unicron_lightning.planner.search.variants import Choice, SearchProblem

EVERYTHING = 1 << 61
"""A number above any number of options and above any distance between a known plan and a bound."""

FEW_OPTIONS = 24
"""Options per task in the first tables, which use a guessed limit."""

WORTH_REMOVING = 0.9
"""Part of the options that may remain for it to pay to copy them."""


def best_choices(problem: SearchProblem) -> list[Choice]:
    """The best plan of each variant; ties are broken as described in `unicron_lightning.planner.solver`."""
    prices, distances = _bounds(problem)
    problem = _without_hopeless(problem, prices, distances)
    limits, mask = _guess(problem, prices, distances)
    while True:
        rows = Rows.fill(problem.columns.chosen(mask), problem)
        found = [rows.best(index) for index in range(len(problem.variants))]
        worst = [bound - top for (_, bound), (top, _, _) in zip(prices, found, strict=True)]
        distances = [min(known, new) for known, new in zip(distances, worst, strict=True)]
        if all(limit >= distance for limit, distance in zip(limits, distances, strict=True)):
            return [rows.choice(index, *best) for index, best in enumerate(found)]
        limits = distances
        marked = _mark(problem, prices, limits, EVERYTHING)
        assert marked is not None
        mask = marked


def _bounds(problem: SearchProblem) -> tuple[list[tuple[int, int]], list[int]]:
    """For each variant its price (-1: none) and upper bound, and the largest distance of the best plan from the
    bound.
    """
    most = (1 << 62) // (problem.free_units + 1)
    prices, distances = [], []
    price = -1
    for index in range(len(problem.variants)):
        price, bound, value = kernels.find_price(
            problem.hull_starts,
            problem.vertices,
            problem.columns.units,
            problem.columns.keys,
            problem.num_tasks,
            problem.skipped(index),
            problem.num_tasks + index,
            problem.num_units,
            most,
            price,
        )
        # Without a price that fits into 64 bits no option is excluded.
        prices.append((price, bound if price >= 0 else EVERYTHING))
        distances.append(bound - value if price >= 0 else EVERYTHING)
    return prices, distances


def _without_hopeless(problem: SearchProblem, prices: list[tuple[int, int]], distances: list[int]) -> SearchProblem:
    """The problem without most of the options that are in no best plan of any variant.

    It looks once at each option, where `_mark` does for each variant.
    """
    found = np.array([price for price, _ in prices])
    if found.min() < 0:
        return problem
    low, high = int(found.min()), int(found.max())
    num = problem.num_tasks
    middles = np.concatenate([np.full(num, (low + high) // 2), found])
    spreads = np.concatenate([np.full(num, high - (low + high) // 2), np.zeros_like(found)])
    limits = np.concatenate([np.full(num, max(distances)), distances]).astype(np.int64)
    columns = problem.columns
    mask = np.zeros(len(columns.units), dtype=np.bool_)
    arrays = (problem.hull_starts, problem.vertices, columns.starts, columns.units, columns.keys)
    kernels.near_hull(*arrays, middles, spreads, limits, mask)
    return problem.chosen(mask) if mask.sum() < WORTH_REMOVING * len(mask) else problem


def _guess(
    problem: SearchProblem, prices: list[tuple[int, int]], distances: list[int]
) -> tuple[list[int], NDArray[np.bool_]]:
    """Limits on reduced costs that leave few options, and the remaining options."""
    few = FEW_OPTIONS * (problem.num_tasks + len(problem.variants)) + 64
    for shift in range(0, 64, 2):
        limits = [distance >> shift for distance in distances]
        mask = _mark(problem, prices, limits, few)
        if mask is not None:
            return limits, mask
    mask = _mark(problem, prices, limits, EVERYTHING)  # more options than the limit are equally good
    assert mask is not None
    return limits, mask


def _mark(
    problem: SearchProblem, prices: list[tuple[int, int]], limits: list[int], most_marked: int
) -> NDArray[np.bool_] | None:
    """The options within the limit of some variant; None if there are more than ``most_marked``."""
    columns = problem.columns
    if min(price for price, _ in prices) < 0:
        return np.ones(len(columns.units), dtype=np.bool_)
    arrays = (problem.hull_starts, problem.vertices, columns.units, columns.keys)
    mask = np.zeros(len(columns.units), dtype=np.bool_)
    marked = 0
    for scan in _scans(problem, [price for price, _ in prices], limits):
        marked = kernels.mark(*arrays, *scan, mask, marked, most_marked)
        if marked > most_marked:
            return None
    return mask


def _scans(problem: SearchProblem, prices: list[int], limits: list[int]) -> Iterator[tuple[int, int, int, int, int]]:
    """Columns to look at, as arguments of `kernels.mark`: the first, the end, one to skip, the price and the limit.

    Of variants with equal prices the one with the largest limit marks all that the others would, except in the column
    that it replaces.
    """
    of_price: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for index, (price, limit) in enumerate(zip(prices, limits, strict=True)):
        of_price[price].append((limit, problem.skipped(index)))
    num = problem.num_tasks
    for price, variants in of_price.items():
        largest, skip = max(variants)
        yield 0, num, skip, price, largest
        others = [limit for limit, skipped in variants if skipped != skip]
        if skip >= 0 and others:
            yield skip, skip + 1, -1, price, max(others)
    for index, (price, limit) in enumerate(zip(prices, limits, strict=True)):
        yield num + index, num + index + 1, -1, price, limit
