"""The rank of a device of the declared world, which this process has while a stream is read, and such a stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import IterableDataset

rank = 0


@contextmanager
def seen_as(device: int) -> Iterator[None]:
    """Give this process the rank of a device."""
    global rank
    own, rank = rank, device
    try:
        yield
    finally:
        rank = own


class Lengths(IterableDataset[Any]):
    """Device d has ``lengths[d]`` samples: the device and the sample's number."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __iter__(self) -> Iterator[Any]:
        yield from (torch.tensor([rank, number]) for number in range(self.lengths[rank]))
