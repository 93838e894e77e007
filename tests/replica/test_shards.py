"""Transfers of shards, for random layouts: each element exactly once, from a holder; losses are named."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import assume, given
from hypothesis import strategies as st

from unicron_lightning.replica.mirror import Holding, Piece, missing, transfers, versions
from unicron_lightning.worker.state_parts import apart, following

SIZES = (7, 1, 12)
"""Elements of each parameter."""
WHOLE = tuple(Piece(number, 0, size) for number, size in enumerate(SIZES))
ELEMENTS = {(number, element) for number, size in enumerate(SIZES) for element in range(size)}


@st.composite
def layouts(draw: st.DrawFn, world: int) -> list[tuple[Piece, ...]]:
    """A division of all elements among ``world`` owners, as a distributed optimizer's: contiguous within buckets."""
    shards: list[list[Piece]] = [[] for _ in range(world)]
    for number, size in enumerate(SIZES):
        cuts = sorted(draw(st.lists(st.integers(0, size), max_size=3)))
        for start, stop in pairwise([0, *cuts, size]):
            if start < stop:
                shards[draw(st.integers(0, world - 1))].append(Piece(number, start, stop))
    return [tuple(shard) for shard in shards]


def elements(pieces: tuple[Piece, ...]) -> list[tuple[int, int]]:
    return [(piece.parameter, element) for piece in pieces for element in range(piece.start, piece.stop)]


@st.composite
def failures(draw: st.DrawFn) -> tuple[list[tuple[Piece, ...]], list[int], int]:
    """An old layout, its survivors, and the number of copies."""
    world = draw(st.integers(1, 5))
    survivors = draw(st.lists(st.integers(0, world - 1), unique=True, min_size=1, max_size=world))
    return draw(layouts(world)), sorted(survivors), draw(st.integers(0, 2))


def keepers(owner: int, world: int, copies: int) -> list[int]:
    """The ranks with copies of an owner's shard, on one machine."""
    return apart(owner, following(range(world), owner), [("", "")] * world, copies, anywhere=True)


def held_after(old: list[tuple[Piece, ...]], survivors: list[int], copies: int) -> list[list[Holding]]:
    """The survivors' holdings of version 5: their own shards and those that they mirror."""
    return [
        [
            Holding(version=5, pieces=old[owner])
            for owner in range(len(old))
            if owner == survivor or survivor in keepers(owner, len(old), copies)
        ]
        for survivor in survivors
    ]


@given(failures(), st.data())
def test_each_element_comes_once_from_one_who_has_it(failure: tuple, data: st.DataObject) -> None:
    old, survivors, copies = failure
    joiners = data.draw(st.integers(0, 2))
    held = held_after(old, survivors, copies) + [[]] * joiners
    assume(versions(held, WHOLE) == (5,))
    targets = data.draw(layouts(len(held)))
    found = transfers(5, held, targets)
    for target, shard in enumerate(targets):
        given = [element for item in found if item.target == target for element in elements((item.piece,))]
        assert sorted(given) == sorted(elements(shard)), "each element of the shard exactly once"
    for item in found:
        source = held[item.source][item.holding].pieces
        assert any(p.parameter == item.piece.parameter and p.start <= item.piece.start and item.piece.stop <= p.stop
                   for p in source)  # fmt: skip
        own = {element for holding in held[item.target] for element in elements(holding.pieces)}
        assert item.source == item.target or not own & set(elements((item.piece,))), "nobody is sent what he has"


@given(failures())
def test_what_is_lost_is_what_died_with_all_its_copies(failure: tuple) -> None:
    old, survivors, copies = failure
    held = held_after(old, survivors, copies)
    dead = [
        owner
        for owner in range(len(old))
        if owner not in survivors and not set(keepers(owner, len(old), copies)) & set(survivors)
    ]
    lost = elements(missing(5, held, WHOLE))
    assert sorted(lost) == sorted(element for owner in dead for element in elements(old[owner]))
    assert versions(held, WHOLE) == (() if lost else (5,))


@given(st.lists(st.sampled_from(["ra", "rb", "rc", "sd", "se", "tf"]), min_size=1, max_size=8), st.integers(0, 9))
def test_copies_are_kept_by_others_and_in_other_racks_and_on_other_nodes_first(nodes: list[str], copies: int) -> None:
    places = [(node[0], node) for node in nodes]
    for rank in range(len(nodes)):
        chosen = apart(rank, following(range(len(nodes)), rank), places, copies, anywhere=True)
        assert len(chosen) == len(set(chosen)) == min(copies, len(nodes) - 1)
        assert rank not in chosen
        for part in (0, 1):
            known = {places[each][part] for each in (rank, *chosen)}
            assert len(known) == min(1 + copies, len({place[part] for place in places})), "as many as there are"
        beside = [nodes[other] == nodes[rank] for other in chosen]
        assert beside == sorted(beside)
        if any(beside):
            assert {other for other in range(len(nodes)) if nodes[other] != nodes[rank]} <= set(chosen)


def test_one_dead_of_two_is_restored_from_the_mirror() -> None:
    old = [(Piece(0, 0, 4), Piece(1, 0, 1)), (Piece(0, 4, 7), Piece(2, 0, 12))]
    [found] = [transfers(5, held_after(old, [0], 1), [WHOLE])]
    assert [(item.source, item.piece) for item in found] == [
        (0, Piece(0, 0, 4)), (0, Piece(0, 4, 7)), (0, Piece(1, 0, 1)), (0, Piece(2, 0, 12))
    ]  # fmt: skip


def test_a_newer_version_that_is_not_whole() -> None:
    older = [[Holding(version=4, pieces=WHOLE), Holding(version=5, pieces=(Piece(0, 0, 7),))]]
    assert versions(older, WHOLE) == (4,)
    assert missing(5, older, WHOLE) == (Piece(1, 0, 1), Piece(2, 0, 12))
