"""Assignment of the optimizer state's copies to the members that need them: pure.

With the distributed optimizer (ZeRO-1) each data-parallel rank of a stage owns a *shard*: ranges of the flattened
parameters with their main values and moments. A *holding* is a copy of one shard after a number of optimizer steps, its
*version*, in the host memory of its owner or of a rank that mirrors it. After a failure each member reports its
holdings, and every member computes the same results from these reports:

- `versions`: the complete versions, i.e. those with each element in at least one holding;
- `missing`: the elements of a version without a holding, because an owner died with all its mirrors;
- `transfers`: the ranges that members send to each other, so that each member of the new group gets exactly its shard
  of the new layout.

Shards do not depend on the group's size: a holding made among three ranks serves a group of two, or of four.
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
        pieces: its contents, in the order in which they are stored.
    """

    version: int
    pieces: tuple[Piece, ...]


class Transfer(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """One range to be sent.

    Args:
        source, target: members.
        holding: index of the source's holding.
        piece: the range; it lies within one piece of that holding, and within one piece of the target's shard.
    """

    source: int
    target: int
    holding: int
    piece: Piece


def versions(held: Sequence[Sequence[Holding]], whole: Sequence[Piece]) -> tuple[int, ...]:
    """The versions that can be restored without loss, newest first.

    Args:
        held: each member's holdings.
        whole: all elements of the stage.
    """
    known = {holding.version for holdings in held for holding in holdings}
    return tuple(sorted((version for version in known if not missing(version, held, whole)), reverse=True))


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
    """Transfers by which each target gets its shard, each element once.

    A member takes elements from its own holdings if possible, otherwise from the member that sends least so far.

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
                assert offers, f"no member holds {stretch} of version {version}"
                _, _, source, holding = min(offers)
                if source != target:
                    load[source] += len(stretch)
                found.append(Transfer(source=source, target=target, holding=holding, piece=stretch))
    return tuple(found)


def _by_parameter(version: int, held: Sequence[Sequence[Holding]]) -> defaultdict[int, list[tuple[int, int, Piece]]]:
    """(member, holding, piece) of all holdings of a version, by parameter."""
    candidates: defaultdict[int, list[tuple[int, int, Piece]]] = defaultdict(list)
    for member, holdings in enumerate(held):
        for index, holding in enumerate(holdings):
            if holding.version == version:
                for piece in holding.pieces:
                    candidates[piece.parameter].append((member, index, piece))
    return candidates


def _cut(piece: Piece, candidates: Iterable[tuple[int, int, Piece]]) -> Iterator[Piece]:
    """The piece divided at the bounds of all candidates, so that each candidate has a part completely or not at all."""
    bounds = {piece.start, piece.stop}
    for _, _, other in candidates:
        bounds |= {bound for bound in (other.start, other.stop) if piece.start < bound < piece.stop}
    for start, stop in pairwise(sorted(bounds)):
        yield Piece(piece.parameter, start, stop)
