"""A digest of a worker's state: equal numbers for equal bits on two workers.

It sums the bits of tensors as integers, so that neither the order of additions nor the kind of device matters. A digest
takes one pass over the tensors' memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

_MIX: Final = 0x9E3779B97F4A7C15
"""An odd number of 64 bits, which makes the digest depend on the order of tensors."""
_WORD: Final = (1 << 64) - 1
_EXACT: Final = 52
"""Bits of a digest, which a float64 represents exactly."""
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class StateDigest:
    """A worker's state as it is compared with the others': numbers by the names of its parts.

    Attributes:
        parts: parameters, buffers and the optimizers' settings; empty: nothing is compared.
        further: the rest of the state; empty: it is not compared.
        joined: whether the worker has joined since the last comparison.
    """

    parts: Mapping[str, int] = field(default_factory=dict)
    further: Mapping[str, int] = field(default_factory=dict)
    joined: bool = False

    @property
    def row(self) -> tuple[float, float, float]:
        """The two digests, each 0.0 without parts, and whether the worker has joined."""
        return _folded(self.parts), _folded(self.further), float(self.joined)


NO_DIGEST: Final = StateDigest()


def parts_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the sum of the words of each tensor, modulo 2**64, by its name.

    A change of one bit in one tensor always changes its sum, and a digest of sums with probability 1 - 2**-52.
    """
    return dict(zip(tensors, _numbers([_sum(tensor.detach()) for tensor in tensors.values()]), strict=True))


def part_of(value: object) -> int:
    """Return a number for plain data, by its `repr`."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest(), "little")


def _folded(parts: Mapping[str, int]) -> float:
    """A whole number from 1 to 2**52; 0.0 without parts."""
    total = 0
    for place, (_, value) in enumerate(sorted(parts.items())):
        total = (total ^ (((value + place + 1) * _MIX) & _WORD)) * _MIX & _WORD
    return float(1 + (total >> (64 - _EXACT))) if parts else 0.0


def _sum(tensor: Tensor) -> Tensor:
    """The sum of a tensor's words as integers, modulo 2**64."""
    flat = tensor.contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    integer = _INTEGERS.get(flat.element_size())
    if integer is None or flat.dtype == torch.bool:
        flat, integer = flat.to(torch.uint8), torch.uint8
    return flat.view(integer).sum(dtype=torch.int64)


def _numbers(sums: list[Tensor]) -> list[int]:
    """The values of scalars, fetched in one transfer if they are on one device."""
    if not sums:
        return []
    if len({each.device for each in sums}) == 1:
        numbers: list[int] = torch.stack(sums).tolist()
        return numbers
    return [int(each) for each in sums]
