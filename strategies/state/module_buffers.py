"""Buffers that a module changes in its forward: codebooks, queues, moving averages.

torch DDP broadcasts rank 0's buffers before each forward, so each step keeps the buffers made by rank 0's batch. Here
each micro-batch starts from the step's buffers, and the step keeps the buffers made by its first micro-batch. With one
micro-batch per rank this equals DDP, but it does not depend on the rank that computes it, so failures change nothing.

Batch-norm statistics are averaged over the global batch (`sums.NormStatistics`). A buffer that gets another shape is
treated as a cache, such as the angles of rotary embeddings, and stays on its rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from unicron_lightning.worker.buckets import FlatBucket

LOOKS: Final = 2
"""Number of micro-batches at the beginning whose buffers are compared by value."""
LOOK_EVERY: Final = 100
"""Interval of micro-batches at which they are compared again: a change through ``.data`` leaves no other trace."""


@dataclass(kw_only=True)
class _Place:
    """One buffer of the module, with its value at the step's start."""

    owner: nn.Module
    name: str
    tensor: Tensor
    base: Tensor
    version: int

    @property
    def now(self) -> Tensor | None:
        """Return the buffer's present tensor in the module."""
        return self.owner._buffers.get(self.name)

    def refresh(self) -> None:
        """Take the present value as the step's."""
        now = self.now
        if now is not None and now.shape == self.tensor.shape and now.dtype == self.tensor.dtype:
            self.tensor, self.base, self.version = now, now.detach().clone(), now._version

    def touched(self) -> bool:
        """Return whether the tensor was replaced, or written to."""
        return self.now is not self.tensor or self.tensor._version != self.version

    def set(self, value: Tensor) -> None:
        """Set the value of the tensor that the step started with, and put that tensor into the module."""
        with torch.no_grad():
            self.tensor.copy_(value)
        self.owner._buffers[self.name] = self.tensor
        self.version = self.tensor._version


@dataclass(kw_only=True)
class _Packed:
    """Buffers of one type that are reduced in one bucket."""

    bucket: FlatBucket
    parts: list[tuple[int, int, int]] = field(default_factory=list)
    """Buffer, offset and number of elements of each part."""


class ModuleBuffers:
    """The buffers of a module, from step to step.

    Args:
        module: owner of the buffers; buffers registered later are ignored.
    """

    def __init__(self, module: nn.Module) -> None:
        seen: set[int] = set()
        self._places: list[_Place] = []
        for owner in module.modules():
            if (isinstance(owner, _NormBase) and owner.track_running_stats) or isinstance(owner, torchmetrics.Metric):
                continue
            for name, tensor in owner._buffers.items():
                if tensor is not None and id(tensor) not in seen and not tensor.is_complex():
                    seen.add(id(tensor))
                    base, version = tensor.detach().clone(), tensor._version
                    self._places.append(_Place(owner=owner, name=name, tensor=tensor, base=base, version=version))
        self._count = 0
        self._first = 0
        self._carried: tuple[int, ...] = ()
        self._packed: list[_Packed] = []
        self.changed: set[int] = set()
        self.values: dict[int, Tensor] = {}

    def begin(self, first: int, carried: Sequence[int]) -> None:
        """Start a step.

        Args:
            first: number of its first micro-batch.
            carried: buffers that the members know to change, by number.
        """
        self._first, self._carried = first, tuple(carried)
        self.changed, self.values = set(), {}
        for index, place in enumerate(self._places):
            if index in self._carried or place.touched():
                place.refresh()
        self._packed = self._pack()

    @property
    def buckets(self) -> list[FlatBucket]:
        """Buckets to sum over the ranks: the values on the rank that has run the first micro-batch, zeros elsewhere."""
        return [packed.bucket for packed in self._packed]

    def start_micro_batch(self) -> None:
        """Compare the values before a micro-batch, at intervals."""
        if self._looks():
            for place in self._places:
                place.refresh()

    def finish_micro_batch(self, number: int) -> None:
        """Keep the buffers made by the first micro-batch, and restore the step's."""
        looks = self._looks()
        self._count += 1
        for index, place in enumerate(self._places):
            now = place.now
            if now is None or now.shape != place.tensor.shape or now.dtype != place.tensor.dtype:
                continue
            known = index in self._carried or index in self.changed
            if known or place.touched() or (looks and not _same(now, place.base)):
                self.changed.add(index)
                if number == self._first:
                    self.values[index] = now.detach().clone()
                place.set(place.base)
        if number == self._first:
            self._fill()

    def restore(self) -> None:
        """Restore the step's buffers after an exception in a micro-batch."""
        for index, place in enumerate(self._places):
            if place.touched() or index in self._carried:
                place.set(place.base)

    def withdraw(self) -> None:
        """Contribute nothing to the step's result, since another rank has run the first micro-batch."""
        self.values = {}
        for packed in self._packed:
            packed.bucket.local.zero_()

    def commit(self, values: Mapping[int, Tensor]) -> None:
        """Set the buffers to the step's result.

        Args:
            values: values of buffers that were not carried yet, by number.
        """
        for index, value in (*self._unpack(), *values.items()):
            place = self._places[index]
            place.set(value.to(place.tensor.dtype).view_as(place.tensor))

    def _looks(self) -> bool:
        return self._count < LOOKS or self._count % LOOK_EVERY == 0

    def _pack(self) -> list[_Packed]:
        sizes: dict[tuple[torch.dtype, torch.device], int] = {}
        parts: dict[tuple[torch.dtype, torch.device], list[tuple[int, int, int]]] = {}
        for index in self._carried:
            tensor = self._places[index].tensor
            key = _carrier(tensor.dtype), tensor.device
            offset = sizes.get(key, 0)
            parts.setdefault(key, []).append((index, offset, tensor.numel()))
            sizes[key] = offset + tensor.numel()
        return [
            _Packed(bucket=FlatBucket(torch.zeros(sizes[key], dtype=key[0], device=key[1])), parts=part)
            for key, part in parts.items()
        ]

    def _fill(self) -> None:
        for packed in self._packed:
            for index, offset, number in packed.parts:
                value = self.values.get(index)
                source = self._places[index].base if value is None else value
                packed.bucket.local[offset : offset + number] = source.reshape(-1).to(packed.bucket.local.dtype)

    def _unpack(self) -> Iterator[tuple[int, Tensor]]:
        for packed in self._packed:
            for index, offset, number in packed.parts:
                yield index, packed.bucket.reduced[offset : offset + number]


def _carrier(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which a buffer is summed with zeros, exactly."""
    if not dtype.is_floating_point:
        return torch.int64
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.detach(), other) or bool(((one != one) & (other != other) | (one == other)).all())
