"""Evaluations over streams in global batches: each batch once, at its stream's place, and of one size if required."""

from __future__ import annotations

import contextlib
import math
from functools import partial
from typing import Any

import pytest
from data import devices
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from unicron_lightning.data.order import StepShape
from unicron_lightning.data.steps import PassLoader, StreamPass, most_of
from unicron_lightning.data.streams import StreamEnds, StreamOpener, Streams
from unicron_lightning.errors import ConfigError


def pass_of(lengths: list[int], accumulation: int = 2, most: float = math.inf, **options: Any) -> PassLoader:
    """Return a pass of a worker that is alone, and has all streams."""
    loader: DataLoader[Any] = DataLoader(devices.Lengths(lengths), **{"batch_size": 2, "drop_last": True, **options})
    shape, ends = StepShape(devices=len(lengths), accumulation=accumulation), StreamEnds()
    streams = Streams(StreamOpener(loader, len(lengths), 1, devices.seen_as), shape, ends, one_size=True)
    steps = partial(
        StreamPass,
        streams,
        most=lambda: most,
        takes_part=lambda: True,
        own=list,
        agree=lambda look: look(),
        reading=contextlib.nullcontext,
    )
    return PassLoader(loader, steps, list, lambda: 0, lambda: None)


def run(loader: PassLoader) -> list[list[tuple[int, list[int]]]]:
    """Return for each global batch the place and the first sample of each of its batches."""
    found = []
    for batch in loader:
        found.append([])
        for number, place in zip(batch.micro_batches, batch.in_full_step, strict=True):
            found[-1].append((place, batch.fetch(number)[0].tolist()))
            batch.finished(number)
        assert batch.ends is not None
        batch.ends.agree([{"ends": dict(batch.ends.found), "states": {}}])
    return found


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(1, 3), st.sampled_from([math.inf, 1, 3]))
def test_each_whole_batch_is_in_one_global_batch_at_its_streams_place(
    lengths: list[int], accumulation: int, most: float
) -> None:
    loader, size = pass_of(lengths, accumulation, most), len(lengths)
    for _ in range(2):
        found = run(loader)
        assert all(place % size == stream for batches in found for place, (stream, _) in batches)
        first = [(stream, number) for batches in found for _, (stream, number) in batches]
        assert len(first) == len(set(first))
        assert {(stream, number // 2) for stream, number in first} == {
            (stream, number) for stream, length in enumerate(lengths) for number in range(int(min(length // 2, most)))
        }
    loader.close()


def test_a_batch_of_another_size_ends_the_pass_before_it_is_used() -> None:
    loader = pass_of([6, 5], drop_last=False)
    first = next(iter(loader))
    first.finished(0)
    with pytest.raises(ConfigError, match="Lengths: batch 2 of stream 1 has 1 samples, the first batch has 2"):
        first.finished(1)
    loader.close()


@pytest.mark.parametrize(
    ("limit", "length", "most"),
    [(1.0, None, math.inf), (3, None, 3), (3, 2, 2), (1.0, 7, 7), (0.5, 7, 3), (0.5, 12, 6), (0.0, 7, 0)],
)
def test_no_more_is_read_than_the_limit(limit: int | float, length: int | None, most: float) -> None:
    assert most_of(limit, length, StepShape(devices=1, accumulation=3)) == most
