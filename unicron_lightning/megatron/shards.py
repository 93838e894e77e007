"""Which copy of the optimizer's state gives which elements to whom: pure.

With the distributed optimizer (ZeRO-1) each data-parallel rank of a stage owns a *shard*: stretches of the flattened
parameters with their main values and moments. A *holding* is a copy of one shard as it was after a number of optimizer
steps, its *version*, in somebody's host memory: its owner's, or that of a rank which mirrors it. After a failure each
member tells what it holds, and everything else follows from that on every member alike:

- `versions`: which versions are whole, i.e. have each element in at least one holding;
- `missing`: which elements of a version nobody has any more, because an owner died with all who mirrored it;
- `transfers`: who sends which stretch to whom, so that each member of the new group has exactly its shard of the new
  layout.

Shards know nothing of the group's size: a holding made among three serves a group of two, or of four.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


class Piece(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Elements ``start`` to ``stop`` (excluded) of a flattened parameter.

    Args:
        parameter: its place in the order of the stage's parameters.
    """

    parameter: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """A copy of a shard.

    Args:
        version: optimizer steps done when it was made.
        pieces: what it covers, in the order in which it is stored.
    """

    version: int
    pieces: tuple[Piece, ...]


class Transfer(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """One stretch on its way.

    Args:
        source, target: members.
        holding: which of the source's holdings.
        piece: the stretch; it lies within one piece of that holding, and within one piece of the target's shard.
    """

    source: int
    target: int
    holding: int
    piece: Piece


def holders(rank: int, nodes: Sequence[str], copies: int) -> tuple[int, ...]:
    """Who keeps copies of a rank's shard: the next ones in the ring, of other nodes first.

    Args:
        rank: the owner.
        nodes: label of each rank's node; with all the same the result is the next ranks.
        copies: how many are wanted; there are fewer in a small group.
    """
    world = len(nodes)
    ring = [(rank + distance) % world for distance in range(1, world)]
    elsewhere = [other for other in ring if nodes[other] != nodes[rank]]
    beside = [other for other in ring if nodes[other] == nodes[rank]]
    return tuple((elsewhere + beside)[:copies])


def versions(held: Sequence[Sequence[Holding]], whole: Sequence[Piece]) -> tuple[int, ...]:
    """The versions that can be restored without loss, newest first.

    Args:
        held: each member's holdings.
        whole: all elements of the stage.
    """
    known = {holding.version for holdings in held for holding in holdings}
    return tuple(sorted((version for version in known if not missing(version, held, whole)), reverse=True))


def newest_common(surveys: Iterable[Sequence[int]]) -> int | None:
    """The newest version that all stages and slices of the model can restore; None if there is none.

    Args:
        surveys: the `versions` of each.
    """
    sets = [set(survey) for survey in surveys]
    return max(set.intersection(*sets), default=None) if sets else None


def missing(version: int, held: Sequence[Sequence[Holding]], whole: Sequence[Piece]) -> tuple[Piece, ...]:
    """The elements of ``whole`` that no holding of this version has."""
    candidates = _by_parameter(version, held)
    gaps: list[Piece] = []
    for piece in whole:
        position = piece.start
        for _, _, other in sorted(candidates[piece.parameter], key=lambda item: item[2]):
            if other.start > position:
                gaps.append(Piece(piece.parameter, position, min(other.start, piece.stop)))
            position = max(position, other.stop)
            if position >= piece.stop:
                break
        if position < piece.stop:
            gaps.append(Piece(piece.parameter, position, piece.stop))
    return tuple(gap for gap in gaps if len(gap))


def transfers(
    version: int, held: Sequence[Sequence[Holding]], targets: Sequence[Sequence[Piece]]
) -> tuple[Transfer, ...]:
    """How each target gets its shard, each element once.

    What a member holds itself it takes from there; else from the member that gives least so far.

    Args:
        version: one of `versions`.
        held: each member's holdings.
        targets: each member's shard in the new layout.
    """
    candidates = _by_parameter(version, held)
    load = [0] * len(held)
    found = []
    for target, pieces in enumerate(targets):
        for piece in pieces:
            for stretch in _cut(piece, candidates[piece.parameter]):
                offers = [
                    (member != target, load[member], member, index)
                    for member, index, other in candidates[piece.parameter]
                    if other.start <= stretch.start and stretch.stop <= other.stop
                ]
                assert offers, f"nobody holds {stretch} of version {version}"
                _, _, source, holding = min(offers)
                if source != target:
                    load[source] += len(stretch)
                found.append(Transfer(source=source, target=target, holding=holding, piece=stretch))
    return tuple(found)


def _by_parameter(version: int, held: Sequence[Sequence[Holding]]) -> defaultdict[int, list[tuple[int, int, Piece]]]:
    """Parameter to (member, holding, piece) of everything held of a version."""
    candidates: defaultdict[int, list[tuple[int, int, Piece]]] = defaultdict(list)
    for member, holdings in enumerate(held):
        for index, holding in enumerate(holdings):
            if holding.version == version:
                for piece in holding.pieces:
                    candidates[piece.parameter].append((member, index, piece))
    return candidates


def _cut(piece: Piece, candidates: Iterable[tuple[int, int, Piece]]) -> Iterator[Piece]:
    """The piece cut wherever a candidate begins or ends, so that each has a stretch as a whole or not at all."""
    bounds = {piece.start, piece.stop}
    for _, _, other in candidates:
        bounds |= {bound for bound in (other.start, other.stop) if piece.start < bound < piece.stop}
    for start, stop in pairwise(sorted(bounds)):
        yield Piece(piece.parameter, start, stop)
