"""Rounding is as fine as documented, and leaves room in 64 bits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from planner.situations import SHAPES, cluster, shaped, task

from unicron_lightning.planner.solver import columns_of, reward_of, solve
from unicron_lightning.planner.state import REWARD_BITS, move_price


def bound(num_tasks: int, num_units: int) -> float:
    """The price of a moved unit, as a share of the largest reward; it is above twice the error of a plan."""
    state = cluster([task(f"t{n}", np.arange(1.0 + num_units)) for n in range(num_tasks)], num_units)
    largest = num_units * state.duration_seconds
    price = move_price(state)
    assert price > 2 * (0.75 * num_units + 1.75 * num_tasks)
    return price * state.quantum_flop / largest


def test_the_resolution_is_what_is_promised() -> None:
    assert 1e-13 < bound(6, 128) < 2e-12
    assert 1e-12 < bound(256, 12_500) < 6e-11


@pytest.mark.parametrize("kind", SHAPES)
def test_a_plans_keys_add_up_to_its_value_within_the_bound(kind: str) -> None:
    state = shaped(kind, 6, 300, seed=4)
    state = state.adopt(solve(state).allocation)
    state = state.after(state.loss_of(next(iter(state.allocation))))
    price = move_price(state)
    plan = solve(state)
    total = 0
    for curve, column, workers in zip(state.tasks, columns_of(state, (), price), plan.workers, strict=True):
        key = int(column.keys[np.searchsorted(column.units, workers)])
        left = state.allocation.get(curve.task.name, 0) - state.lost.get(curve.task.name, 0)
        rounded = key + price * abs(workers - left)
        total += rounded
        error = abs(rounded - reward_of(state, curve, workers) / state.quantum_flop)
        assert error <= 0.75 * workers + 0.5 + 0.01
    assert abs(total - plan.value / state.quantum_flop) <= 0.75 * 300 + 0.5 * 6
    assert abs(total) < 2**REWARD_BITS


def test_a_coarse_quantum_that_is_given_is_kept_and_a_fine_one_is_not() -> None:
    state = shaped("concave", 3, 30, seed=0)
    coarse = dataclasses.replace(state, quantum_flop=state.quantum_flop * 1024)
    assert coarse.quantum_flop == state.quantum_flop * 1024
    assert dataclasses.replace(state, quantum_flop=state.quantum_flop / 1024).quantum_flop == state.quantum_flop


def test_the_default_leaves_room_for_a_doubling() -> None:
    state = cluster([task("a", [0.0, 1.0, 2.0, 4.0])], 3, running_seconds=lambda n: 1.0)
    twice = dataclasses.replace(state, running_seconds=1.999)
    assert twice.quantum_flop == state.quantum_flop
