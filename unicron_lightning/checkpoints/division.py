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


def shard_writers(shards: Sequence[int | None]) -> list[list[int]]:
    """Return the ranks that hold each shard, in the order in which they are to write it; each replica begins some.

    Args:
        shards: shard of each rank; None: none, as of a spare.
    """
    found: list[list[int]] = [[] for _ in range(1 + max(shard for shard in shards if shard is not None))]
    for rank, shard in enumerate(shards):
        if shard is not None:
            found[shard].append(rank)
    return [ranks[at % len(ranks) :] + ranks[: at % len(ranks)] if ranks else [] for at, ranks in enumerate(found)]
