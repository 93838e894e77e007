"""Shares by speed: every micro-batch once, none of the ranks without one, equal on all ranks, stable under noise."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_lightning.worker.rows import OBSERVED, Balance, ReportSum, deal, fit, shares_of
from unicron_lightning.worker.step import plan_step

TIMES = st.lists(st.floats(0.001, 10), min_size=1, max_size=6)


@given(times=TIMES, extra=st.integers(0, 20))
def test_the_best_counts_leave_nobody_without(times: list[float], extra: int) -> None:
    total = len(times) + extra
    counts = fit(times, total)
    assert sum(counts) == total and min(counts) >= 1
    if len(times) <= 3 and total <= 10:
        parts = [c for c in itertools.product(range(1, total + 1), repeat=len(times)) if sum(c) == total]
        best = min(max(n * t for n, t in zip(part, times, strict=True)) for part in parts)
        assert max(n * t for n, t in zip(counts, times, strict=True)) == pytest.approx(best)


@given(counts=st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_every_micro_batch_falls_to_one_rank(counts: list[int]) -> None:
    number = sum(counts)
    shares = deal(range(number), counts)
    assert sorted(itertools.chain(*shares)) == list(range(number))
    assert [len(share) for share in shares] == counts and all(share == sorted(share) for share in shares)
    assert deal(range(number), [len(part) for part in shares_of(range(number), len(counts))]) == [
        list(range(number))[rank :: len(counts)] for rank in range(len(counts))
    ]
    plans = [plan_step(range(number), 1, ReportSum.nothing(len(counts)), rank, counts) for rank in range(len(counts))]
    assert [list(plan.todo) for plan in plans] == shares


def test_what_is_left_of_a_step_is_dealt_equally() -> None:
    begun = ReportSum(world=2, begun=True, finished=frozenset({0, 1}))
    plans = [plan_step(range(8), 1, begun, rank, [7, 1]) for rank in range(2)]
    assert [plan.todo for plan in plans] == [(2, 4, 6), (3, 5, 7)]


class Ranks:
    """All ranks of a task, with a balance each; their times per micro-batch are given."""

    def __init__(self, world: int, total: int) -> None:
        self.epoch, self.total = 1, total
        self.told: list[list[int]] = []
        self.balances = [
            Balance(lambda: self.total, lambda: self.epoch, lambda c, _: self.told.append(c)) for _ in range(world)
        ]

    def steps(self, number: int, *times: float, noise: float = 0.0) -> list[int] | None:
        chance = random.Random(1)
        for _ in range(number):
            plans = [balance.counts(self.total) for balance in self.balances]
            assert all(plan == plans[0] for plan in plans), "all ranks plan the same"
            taken = [value * (1 + noise * chance.random()) for value in times]
            for balance in self.balances:
                balance.take(taken)
        return self.balances[0].counts(self.total)


def test_a_slow_rank_gets_fewer_and_gets_them_back() -> None:
    ranks = Ranks(3, 12)
    assert ranks.steps(OBSERVED, 1.0, 1.0, 2.0) is None
    assert ranks.steps(1, 1.0, 1.0, 2.0) == [5, 5, 2]
    assert ranks.balances[0].counts(5) is None, "the smaller step at an epoch's end is dealt equally"
    assert ranks.steps(100, 1.0, 1.0, 2.0, noise=0.1) == [5, 5, 2] and len(ranks.told) == 3
    assert ranks.steps(100, 1.0, 1.0, 1.0) == [4, 4, 4]
    assert ranks.steps(10, 1.0, 9.0, 1.0) == [5, 1, 6] or ranks.steps(0) == [6, 1, 5]


def test_noise_moves_nothing_and_another_world_begins_equally() -> None:
    ranks = Ranks(2, 8)
    assert ranks.steps(200, 1.0, 1.0, noise=0.2) is None
    ranks.steps(20, 1.0, 3.0)
    assert ranks.balances[0].counts(8) == [6, 2]
    ranks.epoch = 2
    assert ranks.balances[0].counts(8) is None
    assert ranks.steps(20, 0.0, 3.0) is None, "a rank without a micro-batch tells nothing"
    few = Ranks(3, 2)
    assert few.steps(50, 1.0, 1.0, 2.0) is None
