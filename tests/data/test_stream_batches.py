"""Distribution of streams in evaluations. Random failures are in test_stream_rows.py, also of rows of one batch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
from data import devices
from torch.utils.data import DataLoader, IterableDataset

from unicron_lightning.data.passes import StreamBatches, missing
from unicron_lightning.data.streams import ENDS, StreamOpener
from unicron_lightning.errors import ConfigError
from unicron_lightning.worker.rows import share_streams


def batches_of(lengths: list[int], most: float = math.inf) -> StreamBatches:
    loader: DataLoader[Any] = DataLoader(devices.Lengths(lengths), batch_size=None)
    opener = StreamOpener(loader, len(lengths), 1, devices.seen_as)
    batches = StreamBatches(opener, len(lengths), contextlib.nullcontext)
    batches.begin(0, most)
    return batches


def test_ranks_have_whole_streams_and_deal_out_the_rest() -> None:
    assert [share_streams(range(4), rank, 4) for rank in range(4)] == [[(rank, 0, 1)] for rank in range(4)]
    assert share_streams(range(4), 1, 3) == [(1, 0, 1), (3, 1, 3)]
    assert share_streams([2], 1, 2) == [(2, 1, 2)]
    batches = batches_of([3, 1, 2])
    finished, samples = set[int](), []
    batches.plan(frozenset(), 1, 2, finished)
    for number, _ in batches.rows():
        samples.append(tuple(batches.get(number).tolist()))
        finished.add(number)
    assert samples == [(1, 0), (2, 1)]
    assert finished == {1, 5, ENDS + 1 + 3, ENDS + 2 + 2 * 3}
    assert missing({0, 3, 6, *finished}, 3, math.inf) == [0, 2], "the end of stream 0 is unknown, and batch 2 is lost"
    assert missing({0, 1}, 3, 1) == [2]


def test_a_data_set_that_does_not_repeat_itself_is_refused() -> None:
    class Once(IterableDataset[int]):
        def __init__(self) -> None:
            self.items = iter(range(9))

        def __iter__(self) -> Iterator[int]:
            return self.items

    opener = StreamOpener(DataLoader(Once()), 2, 1, devices.seen_as)
    with pytest.raises(ConfigError, match="Once does not repeat itself"):
        StreamBatches(opener, 2, contextlib.nullcontext).begin(0, math.inf)
