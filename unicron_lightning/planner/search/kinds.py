"""The exact search where each task runs on one of several kinds of workers.

With the kind of every task fixed, each kind is a problem of its own (`unicron_lightning.planner.search.exact`). The
kinds are chosen by branch and bound. With any prices p_k >= 0 per unit of kind k, no plan has a sum of keys above

    sum_k p_k N_k  +  sum_i max over k and units of (g_ik(units) - p_k units)

A node of the search is the kinds that each task may still have, and whether it may be paused. Subgradient steps lower
the bound of a node (Polyak, "Minimization of unsmooth functionals", USSR Computational Mathematics and Mathematical
Physics 9, 1969). A kind of a task whose reduced cost reaches the distance between the bound and the best known plan is
in no better plan and leaves the node. The kinds that are worth most at the prices, solved exactly, give further plans.
A node is divided at the task whose second kind is nearest to its first. Of tasks with equal columns an earlier one has
no later kind, which removes plans that differ by an exchange of equal tasks only.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from unicron_lightning.planner.search.dynamic_program import NEVER
from unicron_lightning.planner.search.exact import (
    NOTHING,
    Column,
    Columns,
    SearchProblem,
    Variant,
    best_choices,
    price_of,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from unicron_lightning.planner.arrays import IntArray

MOST_NODES = 400
"""Nodes of the search after which the best known plan is taken, with the proven distance from the best."""

_FIRST_STEPS, _STEPS = 60, 24
"""Subgradient steps at the first node and at every other."""

_FIRST_TRIES = 4
"""Times that the bound of the first node is lowered, each with a better plan known."""

_PATIENCE = 4
"""Steps without a lower bound after which steps become shorter."""


@dataclass(frozen=True, eq=False, kw_only=True)
class KindChoice:
    """A plan.

    Attributes:
        total: its sum of keys.
        kinds: of each task, an index.
        units: of each task.
        bound: no plan has a greater sum of keys; ``total`` if the search came to its end.
    """

    total: int
    kinds: tuple[int, ...]
    units: tuple[int, ...]
    bound: int


@dataclass(frozen=True, eq=False, kw_only=True)
class KindProblem:
    """Tasks, each with a column of options for every kind on which it can run (at least one), and units of each kind.

    Attributes:
        columns: of each task, by kind.
        num_units: N_k.
    """

    columns: Sequence[Mapping[int, Column]]
    num_units: Sequence[int]
    _solved: dict[tuple[int, tuple[int, ...]], tuple[int, IntArray] | None] = field(default_factory=dict, init=False)

    @cached_property
    def pairs(self) -> IntArray:
        """Every task with each of its kinds: int64 [2, num_pairs]."""
        pairs = [(task, kind) for task, columns in enumerate(self.columns) for kind in sorted(columns)]
        return np.array([[pair[0] for pair in pairs], [pair[1] for pair in pairs]], dtype=np.int64)

    @cached_property
    def options(self) -> Columns:
        """The options of each of the `pairs`."""
        return Columns.join([self.columns[task][kind] for task, kind in self.pairs.T.tolist()])

    @cached_property
    def first_pairs(self) -> IntArray:
        """The index of each task's first pair."""
        return np.searchsorted(self.pairs[0], np.arange(len(self.columns)))

    @cached_property
    def pauses(self) -> IntArray:
        """The key of each task without units; `NEVER` if it has to have some."""
        options = self.options
        at = options.starts[self.first_pairs]
        return np.where(options.units[at] == 0, options.keys[at], NEVER)

    @cached_property
    def equals(self) -> list[list[int]]:
        """Tasks with equal columns, in order."""
        found: defaultdict[object, list[int]] = defaultdict(list)
        for task, columns in enumerate(self.columns):
            found[tuple((k, c.units.tobytes(), c.keys.tobytes()) for k, c in sorted(columns.items()))].append(task)
        return [tasks for tasks in found.values() if len(tasks) > 1]

    def reduced(self, mask: NDArray[np.bool_]) -> KindProblem:
        """The problem with some options, and the least of each column."""
        mask[self.options.starts[:-1]] = True
        kept = self.options.chosen(mask)
        columns: list[dict[int, Column]] = [{} for _ in self.columns]
        for index, (task, kind) in enumerate(self.pairs.T.tolist()):
            columns[task][kind] = kept.column(index)
        return KindProblem(columns=columns, num_units=self.num_units)

    def solve(self, kinds: Sequence[int]) -> tuple[int, IntArray] | None:
        """The best sum of keys with these kinds of the tasks, and the units of each; None if minimums do not fit."""
        total, units = 0, np.zeros(len(self.columns), dtype=np.int64)
        for kind in range(len(self.num_units)):
            tasks = tuple(task for task, chosen in enumerate(kinds) if chosen == kind)
            if (kind, tasks) not in self._solved:
                self._solved[kind, tasks] = self._solve(kind, tasks)
            found = self._solved[kind, tasks]
            if found is None:
                return None
            total += found[0]
            units[list(tasks)] = found[1]
        return total, units

    def _solve(self, kind: int, tasks: tuple[int, ...]) -> tuple[int, IntArray] | None:
        columns = [self.columns[task][kind] for task in tasks]
        if sum(int(column.units[0]) for column in columns) > self.num_units[kind]:
            return None
        end = Variant(position=len(columns), replaces=False, column=NOTHING)
        return best_choices(SearchProblem.of(columns, self.num_units[kind], [end]))[0]


@dataclass(frozen=True, eq=False, kw_only=True)
class _KindsLeft:
    """Plans of a problem.

    Attributes:
        pairs: which pairs of a task and a kind they may have.
        pauses: which tasks may be without units.
    """

    pairs: NDArray[np.bool_]
    pauses: NDArray[np.bool_]

    def ordered(self, problem: KindProblem) -> _KindsLeft:
        """The node without kinds that would put equal tasks out of order; paused ones are the last of them."""
        pairs = self.pairs.copy()
        for tasks in problem.equals:
            for some, sign in ((tasks, 1), (tasks[::-1], -1)):
                least = NEVER
                for task in some:
                    own = np.flatnonzero(problem.pairs[0] == task)
                    kinds = sign * problem.pairs[1, own]
                    pairs[own] &= kinds >= least
                    if sign == 1 or not self.pauses[task]:
                        least = min(kinds[pairs[own]].tolist(), default=least)
        return _KindsLeft(pairs=pairs, pauses=self.pauses)

    def halves(self, problem: KindProblem, bound: _Bound, known: int) -> list[_KindsLeft]:
        """Divide what may be better than the known plan: a task has its best kind or is paused, or has another kind."""
        room = bound.total - known
        pairs, pauses = self.pairs & (bound.reduced < room), self.pauses & (bound.reduced_pauses < room)
        best = problem.pairs[1] == bound.kinds[problem.pairs[0]]
        has_best = np.logical_or.reduceat(pairs & best, problem.first_pairs)[problem.pairs[0]]
        others = np.flatnonzero(pairs & ~best & has_best)
        if room <= 0 or not others.size:
            return []
        task = problem.pairs[0, others[np.argmin(bound.reduced[others])]]
        own, all_tasks = problem.pairs[0] == task, np.arange(len(pauses))
        parts = [
            _KindsLeft(pairs=pairs & ~(own & ~best), pauses=pauses),
            _KindsLeft(pairs=pairs & ~(own & best), pauses=pauses & (all_tasks != task)),
        ]
        return [part.ordered(problem) for part in parts]


@dataclass(frozen=True, eq=False, kw_only=True)
class _Bound:
    """An upper bound on the sums of keys of a node.

    Attributes:
        prices: p_k.
        total: the bound.
        worth: of each option at the prices.
        top: the most that each task is worth.
        reduced: the reduced cost of each pair of a task and a kind, with at least one unit.
        reduced_pauses: the same of each task without units.
        kinds: of each task, the one that is worth most.
        used: units of each kind that the tasks take at the prices.
    """

    prices: IntArray
    total: int
    worth: IntArray
    top: IntArray
    reduced: IntArray
    reduced_pauses: IntArray
    kinds: IntArray
    used: IntArray

    @classmethod
    def at(cls, problem: KindProblem, node: _KindsLeft, prices: IntArray) -> _Bound:
        options, first = problem.options, problem.first_pairs
        tasks, kinds, counts = problem.pairs[0], problem.pairs[1], np.diff(options.starts)
        charges: IntArray = np.repeat(prices[kinds], counts) * options.units
        worth: IntArray = np.subtract(options.keys, charges)
        best = np.maximum.reduceat(np.where(options.units > 0, worth, NEVER), options.starts[:-1])
        most = np.maximum.reduceat(np.where(node.pairs, best, NEVER), first)
        pauses = np.where(node.pauses, problem.pauses, NEVER)
        top = np.maximum(most, pauses)
        pairs = np.flatnonzero((best == most[tasks]) & node.pairs | ((most == NEVER)[tasks]))
        pairs = pairs[np.searchsorted(tasks[pairs], np.arange(len(top)))]
        found = np.flatnonzero(worth == np.repeat(best, counts))
        running = pairs[most >= pauses]
        units = options.units[found[np.searchsorted(found, options.starts[running])]] if found.size else running
        return cls(
            prices=prices,
            total=sum(p * n for p, n in zip(prices.tolist(), problem.num_units, strict=True)) + sum(top.tolist()),
            worth=worth,
            top=top,
            reduced=top[tasks] - best,
            reduced_pauses=top - pauses,
            kinds=kinds[pairs],
            used=np.bincount(kinds[running], weights=units, minlength=len(prices)).astype(np.int64),
        )

    @classmethod
    def lowest(cls, problem: KindProblem, node: _KindsLeft, prices: IntArray, known: int, steps: int) -> _Bound:
        """The lowest that is found; the search for it ends early at ``known``, which excludes the node."""
        best = bound = cls.at(problem, node, prices)
        most = (1 << 61) // (1 + max(problem.num_units))
        length, idle = 1.0, 0
        for _ in range(steps):
            slope = np.array(problem.num_units, dtype=np.float64) - bound.used
            slope[(bound.prices == 0) & (slope > 0)] = 0.0
            if best.total <= known or not slope.any():
                break
            step = length * (bound.total - known) / float(slope @ slope)
            bound = cls.at(problem, node, np.rint(np.clip(bound.prices - step * slope, 0, most)).astype(np.int64))
            idle = 0 if bound.total < best.total else idle + 1
            best = bound if bound.total < best.total else best
            if idle == _PATIENCE:
                bound, length, idle = best, length / 2, 0
        if best.total <= known:
            return best
        # With these kinds each kind has a best price of its own.
        tasks = (
            [c[kind] for c, k in zip(problem.columns, best.kinds, strict=True) if k == kind]
            for kind in range(len(prices))
        )
        exact = [price_of(columns, n) for columns, n in zip(tasks, problem.num_units, strict=True)]
        return min(best, cls.at(problem, node, np.array(exact, dtype=np.int64)), key=lambda each: each.total)


def best_kinds(full: KindProblem, known: Sequence[int], most_nodes: int = MOST_NODES) -> KindChoice:
    """The best plan.

    Args:
        full: the problem.
        known: kinds of the tasks with which their minimums fit.
        most_nodes: limit of the search.
    """
    best, kinds, problem = full.solve(known), tuple(known), full
    assert best is not None, "the minimums do not fit with the kinds that are known to fit"
    count, prices = itertools.count(0, -1), np.zeros(len(full.num_units), dtype=np.int64)
    start = (
        _KindsLeft(pairs=np.ones(full.pairs.shape[1], dtype=bool), pauses=full.pauses > NEVER) if full.columns else None
    )
    waiting = [(NEVER, next(count), start.ordered(full), prices)] if start else []
    for visited in range(most_nodes):
        if not waiting or -waiting[0][0] <= best[0]:
            waiting = []
            break
        _, _, node, prices = heapq.heappop(waiting)
        for _ in range(1 if visited else _FIRST_TRIES):
            bound = _Bound.lowest(problem, node, prices, best[0], _STEPS if visited else _FIRST_STEPS)
            found = problem.solve(bound.kinds.tolist()) if bound.total > best[0] else None
            if found is None or found[0] <= best[0]:
                break
            best, kinds, prices = found, tuple(bound.kinds.tolist()), bound.prices
        for half in node.halves(problem, bound, best[0]):
            heapq.heappush(waiting, (-bound.total, next(count), half, bound.prices))
        if not visited and waiting:
            least = np.repeat(bound.top[full.pairs[0]], np.diff(full.options.starts)) - bound.worth
            problem = full.reduced(least < bound.total - best[0])
    limit = max(best[0], -waiting[0][0]) if waiting else best[0]
    best = full.solve(kinds)
    assert best is not None
    return KindChoice(total=best[0], kinds=kinds, units=tuple(best[1].tolist()), bound=limit)
