"""The last, short step of an epoch: its gradient is that of Lightning's ddp, which repeats samples to complete it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from programs.short_steps import Linear, fit
from torch.utils.data import IterableDataset, TensorDataset

from unicron_lightning.data.order import StepShape

LENGTHS = (4, 2)
"""Batches of the streams."""


class Stream(IterableDataset[Any]):
    """Sample ``10 x device + number`` of each device."""

    def __iter__(self) -> Iterator[Any]:
        device = int(os.environ.get("RANK", "0"))
        yield from ((torch.full((), 10.0 * device + number),) for number in range(LENGTHS[device]))


@pytest.mark.parametrize("automatic", [True, False])
def test_gradient_of_the_last_step(*, automatic: bool) -> None:
    module = Linear(automatic=automatic)
    fit(module, TensorDataset(torch.full((9,), 2.0)), 8, 1)
    assert module.steps == [2.0, 2.0], "one sample of eight devices is its own mean"


@pytest.mark.parametrize(("batches", "last"), [(4, []), (5, [1.0]), (6, [1.0]), (7, [2.0]), (8, [2.0])])
def test_rounds_of_the_last_step_are_divided_by_the_accumulation(batches: int, last: list[float]) -> None:
    module = Linear()
    fit(module, TensorDataset(torch.full((batches,), 2.0)), 2, 2)
    assert module.steps == [2.0, *last]


def test_the_index_of_a_batch_of_a_stream_counts_those_of_its_device() -> None:
    module = Linear()
    fit(module, Stream(), 2, 2)
    assert sorted(module.seen) == [(0.0, 0), (1.0, 1), (2.0, 2), (3.0, 3), (10.0, 0), (11.0, 1)]
    assert module.steps == [(0 + 1 + 10 + 11) / 4, (2 + 3) / 2]


@pytest.mark.parametrize(("places", "divisor"), [([0, 1, 2, 3], 4.0), ([0], 2.0), ([0, 2], 2.0), ([0, 1, 2], 3.0)])
def test_divisor(places: list[int], divisor: float) -> None:
    assert StepShape(devices=2, accumulation=2).divisor(places) == divisor
