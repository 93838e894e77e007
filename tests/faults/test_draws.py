"""Targets and times of random faults: repeatable, and with the given rate."""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_lightning.faults.arrivals import RateClock, arrivals, draw
from unicron_lightning.faults.fault import parse

NODES = ["a", "b", "b", "c"]


@pytest.mark.parametrize(
    ("words", "victims"),
    [
        ("kill rank=1", [1]),
        ("kill rank=-1", [3]),
        ("kill rank=4", []),
        ("kill rank=-5", []),
        ("kill rank=all", [0, 1, 2, 3]),
        ("kill rank=all node=b", [1, 2]),
        ("kill rank=1 node=a", []),
        ("kill node=c", [3]),
        ("kill node=nowhere", []),
    ],
)
def test_the_victims(words: str, victims: list[int]) -> None:
    assert parse(words).victims(NODES, 0.7) == victims


@given(st.floats(0, 1, exclude_max=True), st.lists(st.sampled_from("ab"), min_size=1))
def test_where_nothing_is_said_it_strikes_one_and_any_of_them(number: float, nodes: list[str]) -> None:
    (victim,) = parse("kill").victims(nodes, number)
    assert 0 <= victim < len(nodes)
    all_of_them = {parse("kill").victims(nodes, (place + 0.5) / len(nodes))[0] for place in range(len(nodes))}
    assert all_of_them == set(range(len(nodes)))
    assert parse("kill").victims([], number) == []


def test_arrivals_of_a_fault_without_a_rate_are_when_it_may_begin() -> None:
    assert list(arrivals(parse("kill"))) == [0.0]
    assert list(arrivals(parse("kill after=2m times=2"))) == [120.0, 120.0]


def test_arrivals_of_a_rate_are_as_many_as_it_says_and_the_same_for_the_same_seed() -> None:
    fault = parse("kill rate=60/h after=10s")
    times = list(itertools.islice(arrivals(fault, 3, seed=5), 4000))
    assert times == list(itertools.islice(arrivals(fault, 3, seed=5), 4000))
    assert times[0] > 10.0
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(60, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(60, rel=0.1), "exponential: as wide as long"
    others = [
        next(arrivals(fault, 4, seed=5)),
        next(arrivals(fault, 3, seed=6)),
        next(arrivals(parse("kill rate=1/h"))),
    ]
    assert len({times[0], *others}) == 4
    assert len(list(arrivals(parse("kill rate=60/h times=7")))) == 7


def test_a_faults_own_seed_counts() -> None:
    assert draw(parse("kill seed=2"), "x", seed=1).random() == draw(parse("stop"), "x", seed=2).random()


def test_a_hazard_in_parts_strikes_as_often_as_one_in_a_piece() -> None:
    fine, coarse = (RateClock(draw(parse("kill"), 1)) for _ in range(2))
    assert sum(fine.passed(0.01) for _ in range(100_000)) == pytest.approx(coarse.passed(1000.0), abs=1)
    assert RateClock(draw(parse("kill"), 2)).passed(10_000.0) == pytest.approx(10_000, rel=0.05)


def test_the_language_needs_neither_torch_nor_lightning() -> None:
    code = "import sys, unicron_lightning.faults.fault, unicron_lightning.faults.arrivals; print(sorted(sys.modules))"
    modules = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert "'torch'" not in modules and "'lightning'" not in modules
