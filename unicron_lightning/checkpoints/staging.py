"""Copies the parts of a checkpoint that a worker holds into shared memory."""

from __future__ import annotations

import io
import mmap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from unicron_lightning.checkpoints.division import aligned, divide
from unicron_lightning.checkpoints.messages import StagedPart, StagedTensor, WriteVersion
from unicron_lightning.worker.checkpoint_files import REST
from unicron_lightning.worker.memory_pool import MemoryPool, PooledMemory
from unicron_lightning.worker.operations import pack_parts

_SIMPLE: Final = (bool, int, float, str, type(None))
_LONGEST_KEY: Final = 200
_MOST_KNOWN: Final = 1000
_known: Final[dict[str, bytes]] = {}
"""What torch.save writes for simple values, by their representations, which tell 1 from 1.0 and True."""


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

    @property
    def dtype(self) -> str:
        """As of `StagedTensor`."""
        return "" if self.is_object else str(self.data.dtype).removeprefix("torch.")

    def staged(self, start: int) -> StagedTensor:
        """Describe the piece at a place in memory."""
        return StagedTensor(self.name, self.dtype, self.whole, self.offsets, tuple(self.data.shape), start)

    def rows(self, first: int, end: int) -> HeldTensor:
        """Return some rows of a whole tensor."""
        if not self.whole or 0 in self.whole:
            return self
        return HeldTensor(self.name, self.data[first:end], self.whole, (first, *self.offsets[1:]))


@dataclass(frozen=True, kw_only=True)
class HeldCheckpoint:
    """A checkpoint as one worker holds it.

    Attributes:
        tensors: by the names of their parts, if the model is divided; else all, under "", equal on all workers.
        files: contents of the files beside tensors and index: bytes, or other values for torch.save.
        objects: entries of the index that are in no part, as torch.save writes them.
        places: path of each entry in the nested state.
    """

    tensors: Mapping[str, Sequence[HeldTensor]]
    files: Mapping[str, Any]
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
            tensors={
                "": [HeldTensor(name, each, tuple(each.shape), (0,) * each.dim()) for name, each in tensors.items()]
            },
            files={REST: rest},
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
    pool: MemoryPool, order: WriteVersion, names: Sequence[str], held: HeldCheckpoint, files: Mapping[str, bytes]
) -> tuple[WriteVersion, list[PooledMemory]]:
    """Copy the parts that a rank holds.

    Args:
        pool: of memory.
        order: without its parts.
        names: of all parts, see `HeldCheckpoint.parts`.
        held: the checkpoint.
        files: its `HeldCheckpoint.files`, as bytes.

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
                size += aligned(each.data.nbytes)
            parts.append((part, described))
            sizes.append(size)
    packed = pack_parts([*files.values(), *held.objects.values()])
    memories = pool.take([*sizes, len(packed)])
    for (_, described), memory in zip(parts, memories, strict=False):
        for piece, data in described:
            tensor_in(memory.content, piece).copy_(data)
    memories[-1].content[: len(packed)] = packed
    order = msgspec.structs.replace(
        order,
        parts=[StagedPart(part, [piece for piece, _ in described]) for part, described in parts],
        files=list(files),
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
