"""Buffers that a module changes in its forward: codebooks, queues, moving averages.

torch DDP broadcasts rank 0's buffers before each forward, so each step keeps the buffers made by rank 0's batch. Here
each micro-batch starts from the step's buffers, and the step keeps the buffers made by its first micro-batch. With one
micro-batch per rank this equals DDP, but it does not depend on the rank that computes it, so failures change nothing.

Frozen parameters that a module changes in its forward are treated in the same way: a momentum encoder would otherwise
move once for each micro-batch of its rank. They are followed if they are no larger than the trained ones together.
Which ones are frozen is examined in each step. A parameter has the same number in all steps and on all ranks.

A change is noticed by the tensor's version or storage. Writes through ``.data``, NumPy or a foreign kernel change
neither. Therefore small buffers are restored after each micro-batch and compared by value in each step, and large ones
are compared at intervals (`LOOKS`, `LOOK_EVERY`).

Batch-norm statistics are averaged over the global batch (`sums.NormStatistics`). A buffer that gets another shape, or
is registered later, is treated as a cache, such as the angles of rotary embeddings, and stays on its rank.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from unicron_lightning.errors import ConfigError
from unicron_lightning.worker.buckets import FlatBucket

logger = logging.getLogger(__name__)

SMALL_BYTES: Final = 1 << 20
"""Total size of the buffers, smallest first, that are compared by value in each step."""
LOOKS: Final = 2
"""Number of micro-batches at the beginning whose buffers are compared by value."""
LOOK_EVERY: Final = 100
"""Interval of micro-batches at which they are compared again: a change through ``.data`` leaves no other trace."""


STATISTICS: Final = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers of a batch-norm layer that `sums.NormStatistics` has."""


@dataclass(kw_only=True)
class _TrackedTensor:
    """One buffer of the module, with its value at the step's start."""

    holder: dict[str, Any]
    """The module's buffers, or its parameters, by name."""
    name: str
    tensor: Tensor
    base: Tensor
    version: int
    storage: int

    @classmethod
    def of(cls, holder: dict[str, Any], name: str, tensor: Tensor) -> _TrackedTensor:
        """Return the place of a tensor, without a copy of its value."""
        version, storage = tensor._version, tensor.data_ptr()
        return cls(holder=holder, name=name, tensor=tensor, base=tensor.detach(), version=version, storage=storage)

    @property
    def frozen(self) -> bool:
        """Whether the place has a parameter that needs no gradient; one that is sharded has no memory of its own."""
        now = self.now
        return isinstance(now, nn.Parameter) and not now.requires_grad and now.data_ptr() != 0

    def forget(self) -> None:
        """Free the copy of the step's value."""
        self.base = self.tensor.detach()

    @property
    def now(self) -> Tensor | None:
        """Return the present tensor in the module, unless it has become another kind of tensor."""
        now: Tensor | None = self.holder.get(self.name)
        same = now is not None and now.shape == self.tensor.shape and now.dtype == self.tensor.dtype
        return now if same else None

    def refresh(self) -> None:
        """Take the present value as the step's."""
        now = self.now
        if now is not None:
            self.tensor, self.base = now, now.detach().clone()
            self._written()

    @property
    def kept(self) -> bool:
        """Whether the step's value is a copy, and not the tensor itself."""
        return self.base.data_ptr() != self.tensor.data_ptr()

    def touched(self) -> bool:
        """Return whether the tensor was replaced, or written to."""
        tensor = self.tensor
        replaced = self.holder.get(self.name) is not tensor
        return replaced or tensor._version != self.version or tensor.data_ptr() != self.storage

    def set(self, value: Tensor) -> None:
        """Set the value of the tensor that the step started with, and put that tensor into the module."""
        with torch.no_grad():
            self.tensor.copy_(value)
        self.holder[self.name] = self.tensor
        self._written()

    def _written(self) -> None:
        self.version, self.storage = self.tensor._version, self.tensor.data_ptr()


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
        frozen: follow its frozen parameters, too, if they are no larger than the trained ones.
        norms: follow the statistics of batch norm, too.
    """

    def __init__(self, module: nn.Module, *, frozen: bool = False, norms: bool = False) -> None:
        self._buffers = [_TrackedTensor.of(*found) for found in _buffers(module, norms=norms)]
        self._parameters = [_TrackedTensor.of(*found) for found in _parameters(module)] if frozen else []
        self._places: dict[int, _TrackedTensor] = {}
        """The places that are followed, by number; those of parameters follow those of buffers."""
        self._small: frozenset[int] = frozenset()
        self._compared: list[_TrackedTensor] = []
        """Places of `_small` that the members do not know to change."""
        self._made: dict[int, Tensor] = {}
        """Values that the first micro-batch made in `_compared`, until they are compared."""
        self._count = 0
        self._first = 0
        self._carried: tuple[int, ...] = ()
        self._packed: list[_Packed] = []
        self._changed: set[int] = set()
        self.values: dict[int, Tensor] = {}
        self._follow()

    @property
    def changed(self) -> set[int]:
        """Buffers that this rank's micro-batches have changed, by number."""
        made, self._made = self._made, {}
        for index, value in made.items():
            if not _same(value, self._places[index].base):
                self._changed.add(index)
                self.values[index] = value
        return self._changed

    def begin(self, first: int, carried: Sequence[int]) -> None:
        """Start a step.

        Args:
            first: number of its first micro-batch.
            carried: buffers that the members know to change, by number.
        """
        self._follow()
        self._first, self._carried = first, tuple(index for index in carried if index in self._places)
        self._changed, self.values, self._made = set(), {}, {}
        self._compared = [self._places[index] for index in self._small if index not in self._carried]
        for index, place in self._places.items():
            if index in self._carried or place.touched():
                place.refresh()
            elif isinstance(place.tensor, nn.Parameter) and self._count >= LOOKS and index not in self._small:
                place.base = place.tensor.detach()  # frees the copy; its first later change is noticed a step late
        self._copy_small(back=False)
        self._packed = self._pack()

    @property
    def unsteady(self) -> Iterator[Tensor]:
        """Tensors that micro-batches change, or that are written back after each, changed or not."""
        for index in {*self._small, *self._carried, *self._changed}:
            yield self._places[index].tensor

    @property
    def buckets(self) -> list[FlatBucket]:
        """Buckets to sum over the ranks: the values on the rank that has run the first micro-batch, zeros elsewhere."""
        return [packed.bucket for packed in self._packed]

    def start_micro_batch(self) -> None:
        """Compare the values before a micro-batch, at intervals."""
        if self._looks():
            for place in self._places.values():
                if place.kept:
                    place.refresh()

    def finish_micro_batch(self, number: int) -> None:
        """Keep the buffers made by the first micro-batch, and restore the step's."""
        looks = self._looks()
        self._count += 1
        for index, place in self._places.items():
            now = place.now
            if now is None:
                continue
            known = index in self._carried or index in self._changed
            if known or place.touched() or (looks and place.kept and not _same(now, place.base)):
                self._changed.add(index)
                if number == self._first:
                    self.values[index] = now.detach().clone()
                place.set(place.base)
            elif number == self._first and index in self._small:
                self._made[index] = now.detach().clone()
        self._copy_small(back=True)
        if number == self._first:
            self._fill()

    def hold(self) -> dict[int, Tensor]:
        """Return the changed values for `put_back`, and restore the step's.

        Graphs of paused micro-batches may have the buffers, so their versions stay the same.
        """
        held = {}
        for index, place in self._places.items():
            now = place.now
            if now is not None and place.kept and not _same(now, place.base):
                held[index] = now.detach().clone()
                place.tensor.data.copy_(place.base)
                place.holder[place.name] = place.tensor
        return held

    def put_back(self, held: Mapping[int, Tensor]) -> None:
        """Restore what `hold` has returned."""
        for index, value in held.items():
            self._places[index].tensor.data.copy_(value)

    def restore(self) -> list[str]:
        """Restore the step's buffers after an exception in a micro-batch; return names of those that had changed."""
        restored = []
        for index, place in self._places.items():
            if place.touched() or index in self._carried:
                restored.append(place.name)
                place.set(place.base)
        self._copy_small(back=True)
        return restored

    def withdraw(self) -> None:
        """Contribute nothing to the step's result, since another rank has run the first micro-batch."""
        self.values, self._made = {}, {}
        for packed in self._packed:
            packed.bucket.local.zero_()

    def commit(self, values: Mapping[int, Tensor]) -> None:
        """Set the buffers to the step's result.

        Args:
            values: values of buffers that were not carried yet, by number.
        """
        for index, value in (*self._unpack(), *values.items()):
            place = self._places[index]
            if place.tensor.is_complex() and not value.is_complex():
                value = torch.view_as_complex(value.view(-1, 2))
            place.set(value.to(place.tensor.dtype).view_as(place.tensor))

    def _follow(self) -> None:
        """Follow the buffers, and the parameters that are frozen at present."""
        frozen = {index: place for index, place in enumerate(self._parameters, len(self._buffers)) if place.frozen}
        trained = sum(
            p.tensor.nbytes for index, p in enumerate(self._parameters, len(self._buffers)) if index not in frozen
        )
        if sum(place.tensor.nbytes for place in frozen.values()) > trained:
            frozen = {}
        places = dict(enumerate(self._buffers)) | frozen
        if places.keys() == self._places.keys() and self._places:
            return
        for index, place in self._places.items():
            if index not in places:
                place.forget()
        for index, place in places.items():
            if index not in self._places:
                place.refresh()
        self._places, self._small = places, _smallest(places)

    def _copy_small(self, *, back: bool) -> None:
        """Copy the values of `_compared` between the module and the step's start, in one call."""
        pairs = [(place, place.tensor.detach()) for place in self._compared if place.now is place.tensor]
        if not pairs:
            return
        bases = [place.base for place, _ in pairs]
        tensors = [tensor for _, tensor in pairs]
        torch._foreach_copy_(*((tensors, bases) if back else (bases, tensors)))
        for place, _ in pairs:
            place._written()

    def _looks(self) -> bool:
        return self._count < LOOKS or self._count % LOOK_EVERY == 0

    def _pack(self) -> list[_Packed]:
        sizes: dict[tuple[torch.dtype, torch.device], int] = {}
        parts: dict[tuple[torch.dtype, torch.device], list[tuple[int, int, int]]] = {}
        for index in self._carried:
            tensor = self._places[index].tensor
            key = _carrier(tensor.dtype), tensor.device
            offset = sizes.get(key, 0)
            number = tensor.numel() * (2 if tensor.is_complex() else 1)
            parts.setdefault(key, []).append((index, offset, number))
            sizes[key] = offset + number
        return [
            _Packed(bucket=FlatBucket(torch.zeros(sizes[key], dtype=key[0], device=key[1])), parts=part)
            for key, part in parts.items()
        ]

    def _fill(self) -> None:
        for packed in self._packed:
            for index, offset, number in packed.parts:
                value = self.values.get(index)
                source = self._places[index].base if value is None else value
                source = torch.view_as_real(source) if source.is_complex() else source
                packed.bucket.local[offset : offset + number] = source.reshape(-1).to(packed.bucket.local.dtype)
            packed.bucket.local.add_(0)  # no negative zero, which a sum with zeros does not keep

    def _unpack(self) -> Iterator[tuple[int, Tensor]]:
        for packed in self._packed:
            for index, offset, number in packed.parts:
                yield index, packed.bucket.reduced[offset : offset + number]


class EvaluationBuffers:
    """The buffers of a module during validation and test, which leave them as they are.

    Batches are distributed over the ranks, so that what one leaves behind would differ between ranks.

    Args:
        module: owner of the buffers.
    """

    _warned: ClassVar[set[str]] = set()

    def __init__(self, module: nn.Module) -> None:
        self._buffers = ModuleBuffers(module, norms=True)
        self._buffers.begin(0, ())

    def undo(self) -> None:
        """Restore the values after a batch."""
        for name in self._buffers.restore():
            if name not in self._warned:
                self._warned.add(name)
                logger.warning("evaluation_changes_buffer name=%s: restored, as ranks have other batches", name)


def unsaved(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a state dict leaves out (``persistent=False``), by name: a joiner needs them, too."""
    saved = module.state_dict().keys()
    return {name: tensor for name, tensor in module.named_buffers() if name not in saved}


def restore_unsaved(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Set the buffers of `unsaved`, except caches that this module has not made or has made otherwise."""
    with torch.no_grad():
        for name, tensor in unsaved(module).items():
            value = values.get(name)
            if value is not None and value.shape == tensor.shape and value.dtype == tensor.dtype:
                tensor.copy_(value)


def check_registered(module: nn.Module, first: Collection[str]) -> None:
    """Refuse buffers that belong to the state, but were made after training began: no joiner could load them.

    Args:
        module: owner of the buffers.
        first: keys of its state dict at the beginning.

    Raises:
        ConfigError: the message names the buffer.
    """
    saved = module.state_dict().keys()
    for name, tensor in module.named_buffers():
        if name in saved and name not in first:
            raise ConfigError(
                f"the buffer {name!r} of shape {tuple(tensor.shape)} was made in the first step; a worker that joins "
                "later could not load it: register it in __init__ with its final shape, or with persistent=False if it "
                "is a cache that each worker can make anew"
            )


def _buffers(module: nn.Module, *, norms: bool) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yield the buffers once each, without the states of metrics, and with the statistics of batch norm on request."""
    seen: set[int] = set()
    # Importing it takes half a second: a module that has a metric has imported it.
    metric = getattr(sys.modules.get("torchmetrics"), "Metric", ())
    for owner in module.modules():
        if isinstance(owner, metric):
            continue
        others = STATISTICS if isinstance(owner, _NormBase) and not norms else ()
        for name, tensor in owner._buffers.items():
            if tensor is not None and name not in others and id(tensor) not in seen:
                seen.add(id(tensor))
                yield owner._buffers, name, tensor


def _parameters(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yield the parameters once each, in the module's order."""
    seen: set[int] = set()
    for owner in module.modules():
        parameters: dict[str, Any] = owner._parameters
        for name, parameter in parameters.items():
            if parameter is not None and not is_lazy(parameter) and id(parameter) not in seen:
                seen.add(id(parameter))
                yield owner._parameters, name, parameter


def _smallest(places: Mapping[int, _TrackedTensor]) -> frozenset[int]:
    """Return the numbers of the smallest places, with `SMALL_BYTES` together."""
    found, total = [], 0
    for index in sorted(places, key=lambda each: places[each].base.nbytes):
        total += places[index].base.nbytes
        if total > SMALL_BYTES:
            break
        found.append(index)
    return frozenset(found)


def _carrier(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which a buffer is summed with zeros, exactly."""
    if dtype.is_complex:
        return torch.float64 if dtype == torch.complex128 else torch.float32
    if not dtype.is_floating_point:
        return torch.int64
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.detach(), other) or bool(((one != one) & (other != other) | (one == other)).all())
