"""A digest of parameters: equal numbers for equal bits on two workers.

It sums the bits as integers, so that neither the order of additions nor the kind of device matters. A digest takes one
pass over the parameters' memory and is computed for one in `every` steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor

_MIX: Final = 0x9E3779B97F4A7C15
"""An odd number of 64 bits, which makes the digest depend on the order of tensors."""
_WORD: Final = (1 << 64) - 1
_EXACT: Final = 52
"""Bits of a digest, which a float64 represents exactly."""
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest_of(tensors: Iterable[Tensor]) -> float:
    """A whole number from 1 to 2**52, equal for equal bits in the same order of tensors.

    A change of one bit in one tensor always changes the sum of its words, and the digest with probability 1 - 2**-52.
    """
    total = 0
    sums = [_sum(tensor.detach()) for tensor in tensors if tensor.numel()]
    for place, value in enumerate(_numbers(sums)):
        total = (total ^ (((value + place + 1) * _MIX) & _WORD)) * _MIX & _WORD
    return float(1 + (total >> (64 - _EXACT)))


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
    if len({each.device for each in sums}) == 1:
        numbers: list[int] = torch.stack(sums).tolist()
        return numbers
    return [int(each) for each in sums]
