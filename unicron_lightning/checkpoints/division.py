"""Divides the tensors of a state among the workers that write it. Pure.

The tensors' bytes follow each other and are cut into ranges of about equal size, between rows of a tensor: a part
consists of whole tensors, and of blocks of rows of the tensors at its ends.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from unicron_lightning.worker.state_parts import Place, apart, following

ALIGNMENT: Final = 64
"""Bytes to which each piece is aligned in shared memory."""


@dataclass(frozen=True)
class RowRange:
    """A piece of a tensor: its rows from ``first`` up to, and not including, ``end``.

    Attributes:
        tensor: number of the tensor.
        first, end: along dimension 0. A tensor without dimensions, or without elements, is one piece: 0 to 1.
    """

    tensor: int
    first: int
    end: int

    def place(self, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return offsets and sizes of the piece in a tensor of this shape."""
        if not shape or 0 in shape:
            return (0,) * len(shape), tuple(shape)
        return (self.first, *(0 for _ in shape[1:])), (self.end - self.first, *shape[1:])


def divide(shapes: Sequence[tuple[Sequence[int], int]], parts: int) -> list[list[RowRange]]:
    """Return the pieces of each part.

    Args:
        shapes: shape of each tensor, and bytes of one of its elements.
        parts: number of parts.
    """
    sizes = [math.prod(shape) * width for shape, width in shapes]
    starts = [sum(sizes) * part // parts for part in range(parts)]
    found: list[list[RowRange]] = [[] for _ in range(parts)]
    begin = 0
    for number, ((shape, _), size) in enumerate(zip(shapes, sizes, strict=True)):
        rows = shape[0] if shape and size else 1
        row = max(1, size // rows)
        part, first = bisect_right(starts, begin) - 1, 0
        while first < rows:
            # A row belongs to the part in whose range its first byte is.
            end = rows if part + 1 == parts else min(rows, max(first, -(-(starts[part + 1] - begin) // row)))
            if end > first:
                found[part].append(RowRange(number, first, end))
            part, first = part + 1, end
        begin += size
    return found


def aligned(size: int) -> int:
    """Return the bytes that a piece of this size occupies."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def blocks(shape: Sequence[int], start: int, end: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a range of a tensor's elements into blocks along its dimensions.

    Args:
        shape: of the tensor.
        start: first element of the range, in the order of the elements in memory.
        end: first element after it.

    Returns:
        Offsets and sizes of each block, in the order of their elements.
    """
    if start >= end:
        return []
    if not shape:
        return [((), ())]
    row = math.prod(shape[1:])
    first, last = start // row, -(-end // row)  # rows that the range touches
    if last - first == 1 and end - start < row:
        within = blocks(shape[1:], start - first * row, end - first * row)
        return [((first, *offsets), (1, *sizes)) for offsets, sizes in within]
    head, tail = -(-start // row), end // row
    whole = ((head, *(0 for _ in shape[1:])), (tail - head, *shape[1:]))
    return [
        *blocks(shape, start, head * row),
        *([whole] if tail > head else []),
        *blocks(shape, tail * row, end),
    ]


def part_writers(held: Sequence[Sequence[str]], places: Sequence[Place], partners: int) -> dict[str, list[int]]:
    """Return the ranks that copy each part, in the order in which they are to write it.

    The first writer is one that names the part first. Among several, as the replicas of a shard are, each begins some.
    The others are `apart` from it, if possible.

    Args:
        held: names of the parts that each rank holds; none, as of a spare.
        places: place of each rank.
        partners: number of further ranks.
    """
    names = sorted({name for own in held for name in own}, key=lambda name: (len(name), name))
    found = {}
    for at, name in enumerate(names):
        ranks = [rank for rank, own in enumerate(held) if name in own]
        turned = ranks[at % len(ranks) :] + ranks[: at % len(ranks)]
        first = min(turned, key=lambda rank: held[rank].index(name))
        others = following(turned, turned.index(first))
        found[name] = [first, *apart(first, others, places, partners, anywhere=True)]
    return found
