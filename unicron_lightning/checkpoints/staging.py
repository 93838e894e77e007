"""Copies the parts of a checkpoint that a worker holds into shared memory."""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from unicron_lightning.checkpoints.division import aligned, divide
from unicron_lightning.checkpoints.messages import StagedPart, StagedTensor, WriteVersion
from unicron_lightning.checkpoints.version import tensor_in
from unicron_lightning.worker.memory_pool import MemoryPool, PooledMemory
from unicron_lightning.worker.operations import pack_parts


@dataclass(frozen=True)
class HeldTensor:
    """A tensor of the index, or this worker's piece of it.

    Attributes:
        name: in the index.
        data: the piece, on any device.
        whole: shape of the tensor.
        offsets: place of the piece in it.
    """

    name: str
    data: Tensor
    whole: tuple[int, ...]
    offsets: tuple[int, ...]

    def rows(self, first: int, end: int) -> HeldTensor:
        """Return some rows of a whole tensor."""
        if not self.whole or 0 in self.whole:
            return self
        return HeldTensor(self.name, self.data[first:end], self.whole, (first, *self.offsets[1:]))


@dataclass(frozen=True, kw_only=True)
class HeldCheckpoint:
    """A checkpoint as one worker holds it.

    Attributes:
        tensors: whole ones, equal on all workers, or those of the shard.
        objects: the other entries of the index, as torch.save writes them.
        places: path of each entry in the nested state.
        rest: of Lightning's checkpoint.
        shard: number of the worker's shard, if the model is divided.
    """

    tensors: Sequence[HeldTensor]
    objects: Mapping[str, bytes]
    places: Mapping[str, Sequence[str | int]]
    rest: Mapping[str, Any]
    shard: int | None = None

    @classmethod
    def whole(cls, state: Mapping[str, Any], rest: Mapping[str, Any]) -> HeldCheckpoint:
        """Describe a nested state that this worker holds as a whole."""
        flat, places = flatten_state_dict(dict(state))
        tensors = {name: each.detach() for name, each in flat.items() if _is_plain(each)}
        return cls(
            tensors=[HeldTensor(name, each, tuple(each.shape), (0,) * each.dim()) for name, each in tensors.items()],
            objects={name: saved_bytes(each) for name, each in flat.items() if name not in tensors},
            places=places,
            rest=rest,
        )

    def apart(self, steady: Collection[int]) -> HeldCheckpoint:
        """Return it with copies of all tensors that are not in the storages at these addresses."""
        tensors = [
            each if each.data.untyped_storage().data_ptr() in steady else replace(each, data=each.data.clone())
            for each in self.tensors
        ]
        return replace(self, tensors=tensors)

    def parts(self, number: int) -> list[list[HeldTensor]]:
        """Return the pieces of each part; of a divided model parts are shards, and only the worker's own is here."""
        if self.shard is not None:
            return [list(self.tensors) if part == self.shard else [] for part in range(number)]
        cut = divide([(each.whole, each.data.element_size()) for each in self.tensors], number)
        return [[self.tensors[each.tensor].rows(each.first, each.end) for each in part] for part in cut]


def stage(
    pool: MemoryPool, order: WriteVersion, held: HeldCheckpoint, rest: bytes
) -> tuple[WriteVersion, list[PooledMemory]]:
    """Copy the parts that a rank holds.

    Args:
        pool: of memory.
        order: without its parts.
        held: the checkpoint.
        rest: of Lightning's checkpoint, as torch.save writes it.

    Returns:
        The order, and its memories.

    Raises:
        OSError, MemoryError: there is not enough memory.
    """
    parts, sizes = [], []
    for part, pieces in enumerate(held.parts(len(order.holders))):
        if order.rank in order.holders[part]:
            described, size = [], 0
            for each in pieces:
                dtype, shape = str(each.data.dtype).removeprefix("torch."), tuple(each.data.shape)
                described.append((StagedTensor(each.name, dtype, each.whole, each.offsets, shape, size), each.data))
                size += aligned(each.data.nbytes)
            parts.append((part, described))
            sizes.append(size)
    packed = pack_parts([rest, *held.objects.values()])
    memories = pool.take([*sizes, len(packed)])
    for (_, described), memory in zip(parts, memories, strict=False):
        for piece, data in described:
            tensor_in(memory.content, piece).copy_(data)
    memories[-1].content[: len(packed)] = packed
    staged = [StagedPart(part, [piece for piece, _ in described]) for part, described in parts]
    places = {name: list(place) for name, place in held.places.items()}
    return msgspec.structs.replace(order, parts=staged, objects=list(held.objects), places=places), memories


def saved_bytes(value: Any) -> bytes:
    """Return what torch.save writes."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized
