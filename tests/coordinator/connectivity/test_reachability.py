"""Choice of the nodes that continue when some cannot reach each other: compared with all sets, on random graphs."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Collection

from hypothesis import given
from hypothesis import strategies as st

from unicron_lightning.coordinator.connectivity import Candidate, Pair, continuing, returning

NAMES = "abcdefgh"


def pair(one: str, other: str) -> Pair:
    return frozenset((one, other))


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[Candidate], set[Pair]]:
    names = NAMES[: draw(st.integers(1, len(NAMES)))]
    candidates = [
        Candidate(node=name, workers=draw(st.integers(1, 3)), holds_state=draw(st.booleans())) for name in names
    ]
    pairs = [pair(*two) for two in itertools.combinations(names, 2)]
    return candidates, set(draw(st.lists(st.sampled_from(pairs), unique=True))) if pairs else set()


def reach_each_other(nodes: Collection[str], cut: Collection[Pair]) -> bool:
    return not any(pair(*two) in cut for two in itertools.combinations(nodes, 2))


def all_sets(candidates: list[Candidate], cut: set[Pair]) -> list[tuple[Candidate, ...]]:
    sizes = range(1, len(candidates) + 1)
    every = itertools.chain.from_iterable(itertools.combinations(candidates, size) for size in sizes)
    return [some for some in every if reach_each_other([one.node for one in some], cut)]


@given(graphs())
def test_the_largest_set_that_reaches_itself_continues(graph: tuple[list[Candidate], set[Pair]]) -> None:
    candidates, cut = graph
    chosen = continuing(candidates, cut)
    assert reach_each_other(chosen, cut)
    by_name = {candidate.node: candidate for candidate in candidates}
    assert chosen == [name for name in by_name if name in chosen], "in slot order"

    def worth(some: Collection[Candidate]) -> tuple[bool, int]:
        return any(one.holds_state for one in some), sum(one.workers for one in some)

    best = max(worth(some) for some in all_sets(candidates, cut))
    assert worth([by_name[name] for name in chosen]) == best
    equal = [[one.node for one in some] for some in all_sets(candidates, cut) if worth(some) == best]
    assert chosen == min(equal), "of equals the one with the earliest nodes"


@given(graphs(), st.randoms(use_true_random=False))
def test_who_reports_first_does_not_matter(graph: tuple[list[Candidate], set[Pair]], order: random.Random) -> None:
    candidates, cut = graph
    shuffled = list(cut)
    order.shuffle(shuffled)
    assert continuing(candidates, shuffled) == continuing(candidates, cut)


@given(graphs(), st.integers(1, 3))
def test_the_most_whole_replicas_count_before_workers(graph: tuple[list[Candidate], set[Pair]], size: int) -> None:
    candidates, cut = graph
    names = [candidate.node for candidate in candidates]
    replicas = [names[start : start + size] for start in range(0, len(names), size)]

    def whole(nodes: Collection[str]) -> int:
        return sum(set(replica) <= set(nodes) for replica in replicas)

    sets = all_sets(candidates, cut)
    holding = [some for some in sets if any(one.holds_state for one in some)] or sets
    most = max(whole([one.node for one in some]) for some in holding)
    assert whole(continuing(candidates, cut, replicas)) == most


def test_three_cuts_by_hand() -> None:
    two = [Candidate(node=name) for name in "ab"]
    assert continuing(two, {pair("a", "b")}) == ["a"], "rank 0 stays where neither side is larger"
    three = [Candidate(node=name) for name in "abc"]
    assert continuing(three, {pair("a", "b")}) == ["a", "c"]
    assert continuing(three, {pair("a", "b"), pair("a", "c")}) == ["b", "c"]
    joiner = [Candidate(node="a"), *(Candidate(node=name, holds_state=False) for name in "bc")]
    assert continuing(joiner, {pair("a", "b"), pair("a", "c")}) == ["a"], "without it the state would be lost"


def test_a_large_cluster_is_decided_at_once() -> None:
    names = [f"n{number:04}" for number in range(1000)]
    sides = {name: number % 3 for number, name in enumerate(names)}
    cut = {pair(one, other) for one, other in itertools.combinations(names, 2) if sides[one] != sides[other]}
    started = time.monotonic()
    assert continuing([Candidate(node=name) for name in names], cut) == names[::3]
    links = {pair(one, other) for one, other in zip(names[::2], names[1::2], strict=True)}
    chosen = continuing([Candidate(node=name) for name in names], links)
    assert len(chosen) == 500 and reach_each_other(chosen[:30], links)
    assert time.monotonic() - started < 60, "a second or two where nothing else runs"


@given(graphs())
def test_who_returns_reaches_all_others(graph: tuple[list[Candidate], set[Pair]]) -> None:
    candidates, cut = graph
    names = [candidate.node for candidate in candidates]
    inside = continuing(candidates, cut)
    outside = [name for name in names if name not in inside]
    assert returning(inside, outside, set()) == outside
    healed = {some for some in cut if not some & set(outside[:1])}
    back = returning(inside, outside, healed)
    assert reach_each_other([*inside, *back], healed)
    assert outside[:1] == back[:1], "nothing keeps it away"
