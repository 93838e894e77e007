"""The rank of a device of the declared world, which this process has while a stream is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
