"""The parts of a checkpoint in a folder: their writing, and their descriptions, from which `index` makes torch's index.

Apart from `index`, since a writer that writes no index need not import `torch.distributed.checkpoint`: half its start.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any, cast

import msgspec
import torch
from torch import Tensor

from unicron_lightning.checkpoints.messages import StagedTensor
from unicron_lightning.worker.checkpoint_files import HashingFile


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


def write_pieces(file: HashingFile, name: str, pieces: Iterable[tuple[StagedTensor, Tensor]]) -> list[IndexEntry]:
    """Write tensors, and objects that are held as bytes, to a file; return their entries of the index.

    Args:
        file: open for writing.
        name: of the file, in the checkpoint.
        pieces: each with its values in host memory, in a storage of their own.
    """
    entries = []
    for each, tensor in pieces:
        start = file.tell()
        if each.dtype:
            torch.save(tensor, cast("IO[bytes]", file))
            place = each.dtype, each.whole, each.offsets, each.sizes
            entries.append(IndexEntry(each.name, name, start, file.tell() - start, *place))
        else:
            entries += write_objects(file, name, {each.name: tensor.numpy()})
    return entries


def write_objects(file: HashingFile, name: str, objects: Mapping[str, Any]) -> list[IndexEntry]:
    """Write objects of the index, given by their names as torch.save writes them; return their entries."""
    entries = []
    for each, data in objects.items():
        entries.append(IndexEntry(each, name, file.tell(), len(data)))
        file.write(data)
    return entries


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
