"""Choice of the running tasks when the minimums of tasks that may not be paused do not fit together.

Tasks that may not be paused then have priority, by weighted value: among all subsets whose minimums fit, the one with
the largest sum of F(t, minimum) runs, and among equal ones the one with more running tasks. The remaining tasks of this
kind are paused. All other workers are allocated by reward to the tasks that run or may be paused.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from unicron_lightning.planner.search.exact import SearchProblem, Variant, best_choices
from unicron_lightning.planner.search.options import NOTHING, Column

if TYPE_CHECKING:
    from unicron_lightning.planner.reward import Curve
    from unicron_lightning.planner.state import ClusterState

_VALUE_BITS = 44
"""Number of bits to which F is rounded, relative to the power of two above the sum of all."""


def must_pause(state: ClusterState) -> tuple[str, ...]:
    """Names of the tasks that have to be paused although they may not be, in order; empty if the minimums fit."""
    bound = [curve for curve in state.tasks if not curve.task.terms.may_pause]
    able = [curve for curve in bound if len(curve.workers) and curve.workers[0] <= state.num_workers]
    num_units = state.num_workers // state.unit
    if sum(int(curve.workers[0]) // state.unit for curve in able) > num_units:
        able = _best_subset(state, able, num_units)
    kept = {curve.task.name for curve in able}
    return tuple(curve.task.name for curve in bound if curve.task.name not in kept)


def _best_subset(state: ClusterState, curves: list[Curve], num_units: int) -> list[Curve]:
    """Solve a knapsack: the curves with the largest sum of F at their minimums."""
    # A power of two, so that rounding keeps equal sums of short values equal.
    _, exponent = math.frexp(math.fsum(float(curve.waf[0]) for curve in curves))
    columns = []
    for curve in curves:
        value = round(math.ldexp(float(curve.waf[0]), _VALUE_BITS - exponent)) * (len(curves) + 1)
        key = value + (state.allocation.get(curve.task.name, 0) > 0)
        units = np.array([0, int(curve.workers[0]) // state.unit], dtype=np.int64)
        columns.append(Column(units=units, keys=np.array([0, key], dtype=np.int64)))
    end = Variant(position=len(columns), replaces=False, column=NOTHING)
    ((_, chosen),) = best_choices(SearchProblem.of(columns, num_units, [end]))
    return [curve for curve, units in zip(curves, chosen, strict=True) if units]
