"""Descriptions of the parts of a checkpoint in a folder; `index` makes torch's index from them.

Apart from `index`, since a writer that writes no index need not import `torch.distributed.checkpoint`: half its start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec


class IndexEntry(msgspec.Struct, frozen=True):
    """A shard of a tensor, a whole tensor, or, without ``dtype``, another object, with its place in a file."""

    name: str
    file: str
    start: int
    length: int
    dtype: str | None = None
    whole: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


class WrittenPart(msgspec.Struct, frozen=True):
    """A worker's part of a folder, with the digests of its files, and the name of the version, if it has one."""

    pieces: list[IndexEntry]
    digests: dict[str, str]
    version: str = ""


def check_whole(pieces: Sequence[IndexEntry]) -> None:
    """Check that the pieces of each tensor have as many elements as the tensor.

    Raises:
        ValueError: those of a tensor have not.
    """
    missing: dict[str, int] = {}
    for piece in pieces:
        if piece.dtype is not None:
            missing.setdefault(piece.name, math.prod(piece.whole))
            missing[piece.name] -= math.prod(piece.sizes)
    if found := {name: number for name, number in missing.items() if number}:
        name, number = next(iter(found.items()))
        raise ValueError(
            f"{number} elements of {name} are in no part, or several times in some; {len(found)} such tensors"
        )
