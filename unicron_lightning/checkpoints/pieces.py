"""Pieces of a checkpoint's tensors: held by a worker, divided among writers, in shared memory, and in files.

A piece is a block of a tensor, given by its offsets and sizes. A model that each worker holds as a whole is divided
here: the tensors' bytes follow each other and are cut into ranges of about equal size, between rows of a tensor. A part
then consists of whole tensors, and of blocks of rows of the tensors at its ends. A divided model has parts of its own.

Apart from `index`, since a writer that writes no index need not import `torch.distributed.checkpoint`: half its start.
"""

from __future__ import annotations

import hashlib
import io
import math
import mmap
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, Any, Final, cast

import msgspec
import torch
from torch import Tensor

from unicron_lightning.checkpoints.files import INDEX, REST, HashingFile
from unicron_lightning.checkpoints.messages import StagedPart, StagedTensor, WriteVersion
from unicron_lightning.checkpoints.storage import DATA_SUFFIX, VersionStorage
from unicron_lightning.shared_memory import MemoryPool, PooledMemory
from unicron_lightning.worker.codec import pack_parts
from unicron_lightning.worker.state_parts import RackAndNode, apart, following

ALIGNMENT: Final = 64
"""Bytes to which each piece is aligned in shared memory."""
_OBJECTS: Final = "objects.distcp"
_SIMPLE: Final = (bool, int, float, str, type(None))
_LONGEST_KEY: Final = 200
_MOST_KNOWN: Final = 1000
_known: Final[dict[str, bytes]] = {}
"""What torch.save writes for simple values, by their representations, which distinguish 1 from 1.0 and True."""


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


def part_writers(held: Sequence[Sequence[str]], places: Sequence[RackAndNode], partners: int) -> dict[str, list[int]]:
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


# ---- a checkpoint as a worker holds it


@dataclass(frozen=True)
class HeldTensor:
    """A tensor of the index, or this worker's piece of it, or an object.

    Attributes:
        name: in the index.
        data: the piece, on any device; of an object the bytes that torch.save writes, uint8.
        whole: shape of the tensor.
        offsets: place of the piece in it.
        is_object: whether it is an object.
    """

    name: str
    data: Tensor
    whole: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    is_object: bool = False

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> HeldTensor:
        """Describe a whole tensor."""
        return cls(name, tensor, tuple(tensor.shape), (0,) * tensor.dim())

    @property
    def dtype(self) -> str:
        """As of `StagedTensor`."""
        return "" if self.is_object else str(self.data.dtype).removeprefix("torch.")

    def staged(self, start: int = 0) -> StagedTensor:
        """Describe the piece at a place in memory."""
        return StagedTensor(self.name, self.dtype, self.whole, self.offsets, tuple(self.data.shape), start)

    def rows(self, first: int, end: int) -> HeldTensor:
        """Return some rows of a whole tensor."""
        if not self.whole or 0 in self.whole:
            return self
        return replace(self, data=self.data[first:end], offsets=(first, *self.offsets[1:]))


@dataclass(frozen=True, kw_only=True)
class HeldCheckpoint:
    """A checkpoint as one worker holds it.

    Attributes:
        tensors: by the names of their parts, if the model is divided; else all, under "", equal on all workers.
        files: contents of the files beside tensors and index.
        objects: entries of the index that are in no part, as torch.save writes them.
        places: path of each entry in the nested state.
    """

    tensors: Mapping[str, Sequence[HeldTensor]]
    files: Mapping[str, bytes]
    objects: Mapping[str, bytes] = field(default_factory=dict)
    places: Mapping[str, Sequence[str | int]] = field(default_factory=dict)

    @classmethod
    def whole(cls, state: Mapping[str, Any], rest: Mapping[str, Any]) -> HeldCheckpoint:
        """Describe a nested state that this worker holds as a whole."""
        from torch.distributed.checkpoint._nested_dict import flatten_state_dict  # takes half a second to import

        flat, places = flatten_state_dict(dict(state))
        tensors = {
            name: each.detach() if each.requires_grad else each for name, each in flat.items() if _is_plain(each)
        }
        return cls(
            tensors={"": [HeldTensor.of(name, each) for name, each in tensors.items()]},
            files={REST: saved_bytes(rest)},
            objects={name: saved_bytes(each) for name, each in flat.items() if name not in tensors},
            places=places,
        )

    @property
    def sources(self) -> list[Tensor]:
        """The data of all tensors and objects."""
        return [each.data for part in self.tensors.values() for each in part]

    def apart(self, steady: Collection[int]) -> HeldCheckpoint:
        """Return it with copies of all tensors that are not in the storages at these addresses."""

        def own(each: HeldTensor) -> HeldTensor:
            is_steady = each.data.untyped_storage().data_ptr() in steady
            return each if is_steady else replace(each, data=each.data.clone())

        return replace(self, tensors={part: [own(each) for each in held] for part, held in self.tensors.items()})

    def parts(self, names: Sequence[str]) -> list[Sequence[HeldTensor] | None]:
        """Return the pieces of each part, or None if they are not here.

        Args:
            names: of a divided model's parts; otherwise only their number counts.
        """
        if (tensors := self.tensors.get("")) is None:
            return [self.tensors.get(name) for name in names]
        cut = divide([(each.whole, each.data.element_size()) for each in tensors], len(names))
        return [[tensors[each.tensor].rows(each.first, each.end) for each in part] for part in cut]


def stage(
    pool: MemoryPool, order: WriteVersion, names: Sequence[str], held: HeldCheckpoint
) -> tuple[WriteVersion, list[PooledMemory]]:
    """Copy the parts that a rank holds.

    Args:
        pool: of memory.
        order: without its parts.
        names: of all parts, see `HeldCheckpoint.parts`.
        held: the checkpoint.

    Returns:
        The order, and its memories.

    Raises:
        OSError, MemoryError: there is not enough memory.
        LookupError: this worker does not hold a part, since the world has changed after the parts were agreed on.
    """
    parts, sizes = [], []
    for part, pieces in enumerate(held.parts(names)):
        if order.rank in order.holders[part]:
            if pieces is None:
                raise LookupError(f"part {names[part]!r} is not here any more, since the world has changed")
            described, size = [], 0
            for each in pieces:
                described.append((each.staged(size), each.data))
                size += -(-each.data.nbytes // ALIGNMENT) * ALIGNMENT
            parts.append((part, described))
            sizes.append(size)
    packed = pack_parts([*held.files.values(), *held.objects.values()])
    memories = pool.take([*sizes, len(packed)])
    for (_, described), memory in zip(parts, memories, strict=False):
        for piece, data in described:
            tensor_in(memory.content, piece).copy_(data)
    memories[-1].content[: len(packed)] = packed
    order = msgspec.structs.replace(
        order,
        parts=[StagedPart(part, [piece for piece, _ in described]) for part, described in parts],
        files=list(held.files),
        objects=list(held.objects),
        places={name: list(place) for name, place in held.places.items()},
    )
    return order, memories


def saved_bytes(value: Any) -> bytes:
    """Return what torch.save writes; the same numbers and words, such as an optimizer's settings, are saved often."""
    items = value if type(value) is tuple else (value,)
    key = repr(value) if all(type(item) in _SIMPLE for item in items) else None
    if key is not None and (known := _known.get(key)) is not None:
        return known
    file = io.BytesIO()
    torch.save(value, file)
    saved = file.getvalue()
    if key is not None and len(key) <= _LONGEST_KEY:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[key] = saved
    return saved


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized


def tensor_in(memory: mmap.mmap, each: StagedTensor) -> torch.Tensor:
    """Return a piece in shared memory as a tensor of its sizes, without a copy."""
    dtype = getattr(torch, each.dtype or "uint8")
    number = torch.Size(each.sizes).numel()
    if number == 0:
        return torch.empty(each.sizes, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=number, offset=each.start).view(each.sizes)


# ---- in files


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


def write_part(
    storage: VersionStorage, part: int, rank: int, pieces: Iterable[tuple[StagedTensor, Tensor]]
) -> WrittenPart:
    """Write a part of a version, as a rank has it, to a file; return its description.

    Args:
        storage: of the version, begun.
        part: number of the part.
        rank: this one.
        pieces: see `write_pieces`.
    """
    name = f"__{part}_{rank}{DATA_SUFFIX}"
    full_name = storage.prefix + name
    with storage.create(name) as file:
        entries = write_pieces(file, full_name, pieces)
    return WrittenPart(entries, {full_name: file.digest})


def publish(
    storage: VersionStorage,
    pieces: Sequence[IndexEntry],
    objects: Mapping[str, bytes],
    files: Mapping[str, bytes],
    places: Mapping[str, Sequence[str | int]],
) -> dict[str, str]:
    """Write all of a version that is in no part, with the index as the last file: it is complete then.

    Args:
        storage: of the version, begun.
        pieces: of all parts.
        objects: see `HeldCheckpoint`.
        files: see `HeldCheckpoint`.
        places: see `HeldCheckpoint`.

    Returns:
        Digests of these files, by name.

    Raises:
        ValueError: see `check_whole`.
    """
    from unicron_lightning.checkpoints.index import encode_index  # takes half a writer's start to import

    digests = {}
    if objects:
        with storage.create(_OBJECTS) as file:
            pieces = [*pieces, *write_objects(file, storage.prefix + _OBJECTS, objects)]
        digests[storage.prefix + _OBJECTS] = file.digest
    check_whole(pieces)
    written = {**files, INDEX: encode_index(pieces, {name: tuple(place) for name, place in places.items()})}
    storage.publish(written)
    return digests | {name: hashlib.sha256(data).hexdigest() for name, data in written.items()}


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
