"""Random state that depends on the place in the program, never on the rank."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import numpy
import torch

_preserving = False


class RandomPurpose(IntEnum):
    """First number of the place of random state that is not that of fetching samples, which has none.

    Different numbers keep, for example, computing and moving samples apart at the same step and micro-batch.
    """

    FORWARD = 1
    """Computing a micro-batch."""
    STREAM = 2
    """Reading a stream."""
    PART = 3
    """Augmentations of one of several loaders; its number follows."""
    TRANSFER = 4
    """Moving samples to the device, where computing does not follow."""
    EVALUATION = 5
    PREDICTION = 6
    OPTIMIZER = 7
    """An optimizer's step in manual optimization."""


def place_seed(seed: int, *place: int) -> int:
    """A 63-bit seed for a place such as (epoch, step, micro-batch): well mixed, the same on every machine."""
    digest = hashlib.blake2b(",".join(f"{number:d}" for number in (seed, *place)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_all(value: int) -> None:
    """Seed Python, NumPy and torch (the CPU, and all CUDA devices once CUDA is in use)."""
    random.seed(value)
    numpy.random.seed(value & 0xFFFFFFFF)
    # torch.manual_seed would format a stack trace for each unused kind of device: about a millisecond in total.
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value)


@contextmanager
def kept() -> Iterator[None]:
    """Restore at the end the random state of the beginning, also within `preserved`."""
    states = random_states()
    try:
        yield
    finally:
        restore_random_states(states)


@contextmanager
def preserved() -> Iterator[None]:
    """Preserve the random state of Python, NumPy and torch (CPU and the present CUDA device).

    A nested use does nothing: the outer one restores, once per step instead of once per micro-batch.
    """
    global _preserving
    if _preserving:  # the outer use restores the state
        yield
        return
    _preserving = True
    try:
        with kept():
            yield
    finally:
        _preserving = False


@contextmanager
def seeded(seed: int, *place: int) -> Iterator[None]:
    """Inside, the random state is that of the place; afterwards it is restored."""
    with kept():
        seed_all(place_seed(seed, *place))
        yield


def random_states(*, cuda: bool = True) -> dict[str, object]:
    """The present random state, as plain data and tensors; of CUDA only if it is in use and wanted."""
    states: dict[str, object] = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if cuda and torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_states(states: dict[str, object]) -> None:
    """Restore a result of `random_states`."""
    random.setstate(states["python"])  # type: ignore[arg-type]
    numpy.random.set_state(states["numpy"])  # type: ignore[arg-type]
    torch.set_rng_state(states["torch"])  # type: ignore[arg-type]
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])  # type: ignore[arg-type]
