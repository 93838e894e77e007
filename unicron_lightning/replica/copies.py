"""Copies of optimizer shards in host memory: their buffers, senders and holders, and parts of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unicron_lightning.replica.shards import Holding, Piece

ROWS = 3
"""Number of values kept for each element: `sharded.FIELDS`."""


@dataclass(kw_only=True)
class Stored:
    """A holding with its data, float32 [3, elements] in host memory.

    Args:
        holding: the holding.
        data: the values.
        layout: counter of this rank's layouts at the time of the copy.
    """

    holding: Holding
    data: Tensor
    layout: int


@dataclass(kw_only=True)
class VersionBuffers:
    """Buffers for one version: this rank's copy, and copies of other ranks' shards by round of sending."""

    own: Tensor
    kept: list[Tensor]


@dataclass(kw_only=True)
class Ring:
    """Senders and holders in the present group.

    Args:
        layouts: each rank's shard.
        rounds: in each, the holder of each rank's copy.
    """

    layouts: Sequence[tuple[Piece, ...]]
    rounds: list[list[int]]
    slots: list[VersionBuffers] = field(default_factory=list)

    def sources(self, number: int, rank: int) -> list[int]:
        """Owners of the copies that a rank keeps from one round, in rank order."""
        return [owner for owner, holder in enumerate(self.rounds[number]) if holder == rank]

    def elements(self, owner: int) -> int:
        """Number of elements of a rank's shard."""
        return sum(len(piece) for piece in self.layouts[owner])


def _offsets(pieces: Sequence[Piece]) -> list[int]:
    """Offset of each piece in a shard's data."""
    offsets, position = [], 0
    for piece in pieces:
        offsets.append(position)
        position += len(piece)
    return offsets


def cut(stored: Stored, piece: Piece) -> Tensor:
    """The part [3, elements] of a stored shard that ``piece`` describes; it lies within one of the shard's pieces."""
    pieces = stored.holding.pieces
    for other, offset in zip(pieces, _offsets(pieces), strict=True):
        if other.parameter == piece.parameter and other.start <= piece.start and piece.stop <= other.stop:
            start = offset + piece.start - other.start
            return stored.data[:, start : start + len(piece)]
    raise AssertionError(f"{piece} is not within {pieces}")


def assemble(pieces: Sequence[Piece], arrived: Sequence[Piece], data: Tensor) -> Tensor:
    """Assemble a shard [3, elements] from parts in any order, each [3, its elements] flat."""
    shard = torch.empty(ROWS, sum(map(len, pieces)))
    position = 0
    for stretch in arrived:
        part = data[position : position + ROWS * len(stretch)].view(ROWS, -1)
        position += ROWS * len(stretch)
        for piece, offset in zip(pieces, _offsets(pieces), strict=True):
            if piece.parameter == stretch.parameter and piece.start <= stretch.start and stretch.stop <= piece.stop:
                shard[:, offset + stretch.start - piece.start :][:, : len(stretch)].copy_(part)
    return shard
