"""A validation pass in global batches: each batch once, in order, whatever the limits and the share."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from unicron_lightning.data.order import StepShape
from unicron_lightning.data.steps import PassLoader, indexed_pass

SHAPE = StepShape(devices=2, accumulation=2)


def passes(most: float = math.inf, limit: float = math.inf, every: int = 2, **options: Any) -> PassLoader:
    loader = DataLoader(TensorDataset(torch.arange(19)), batch_size=2, **options)
    return indexed_pass(
        loader, SHAPE, 0, most, lambda: limit, lambda numbers: list(numbers[every - 1 :: every]), lambda: 0
    )


def samples(loader: PassLoader) -> list[list[int]]:
    return [sorted(int(x) for number in batch.micro_batches for x in batch.fetch(number)[0]) for batch in loader]


@pytest.mark.parametrize("workers", [0, 1])
def test_every_sample_once(workers: int) -> None:
    loader = passes(num_workers=workers)
    try:
        assert len(loader) == 3
        for _ in range(2):
            assert samples(loader) == [[*range(8)], [*range(8, 16)], [16, 17, 18]]
    finally:
        loader.close()
    batches = list(loader)
    assert [batch.num_samples() for batch in batches] == [8, 8, 3]
    assert [batch.count(number) for batch in batches[-1:] for number in batch.micro_batches] == [2, 1]


def test_limits_are_batches_of_each_device() -> None:
    assert samples(passes(most=1)) == [[0, 1, 2, 3]]
    assert len(passes(most=3)) == 2
    assert samples(passes(most=3)) == [[*range(8)], [8, 9, 10, 11]]
    assert len(passes(limit=1)) == 3  # read only when the pass begins
    assert samples(passes(limit=1)) == [[0, 1, 2, 3]]


def test_what_was_passed_over_may_be_wanted_later() -> None:
    """After a failure other ranks run the batches that this worker had requested; after the next one it may run
    them.
    """
    loader = passes(every=1, num_workers=1, prefetch_factor=4)
    try:
        batch = next(iter(loader))
        assert [batch.fetch(number)[0].tolist() for number in (0, 3, 1)] == [[0, 2], [5, 7], [1, 3]]
    finally:
        loader.close()
