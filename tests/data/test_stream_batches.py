"""Distribution of streams in evaluations: each batch once, whatever world finds the ends."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
from data import devices
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from unicron_lightning.data.passes import StreamBatches, missing
from unicron_lightning.data.streams import ENDS, StreamChanged, StreamOpener
from unicron_lightning.errors import ConfigError
from unicron_lightning.worker.rows import ReportSum, share_streams


class Lengths(IterableDataset[Any]):
    """Device d has ``lengths[d]`` samples."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __iter__(self) -> Iterator[Any]:
        yield from ((devices.rank, number) for number in range(self.lengths[devices.rank]))


def batches_of(lengths: list[int], most: float = math.inf) -> StreamBatches:
    loader: DataLoader[Any] = DataLoader(Lengths(lengths), batch_size=None)
    opener = StreamOpener(loader, len(lengths), 1, devices.seen_as)
    batches = StreamBatches(opener, len(lengths), contextlib.nullcontext)
    batches.begin(0, most)
    return batches


def run(
    batches: StreamBatches, reports: ReportSum, rank: int, finished: set[int], most: int | None = None
) -> list[Any]:
    """Run a rank's share, or the first of it; return the samples."""
    samples = []
    batches.plan(reports.finished, rank, reports.world, finished)
    for number, _ in batches.rows():
        if most is not None and len(samples) == most:
            break
        samples.append(tuple(batches.get(number)))
        finished.add(number)
    return samples


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_each_batch_is_run_once_through_failures(data: st.DataObject) -> None:
    """The rank that dies loses all it has run; the others report what they have run so far."""
    lengths = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=5))
    limit = data.draw(st.sampled_from([math.inf, 0, 1, 3]))
    world = data.draw(st.integers(1, 6))
    batches = batches_of(lengths, limit)
    members: list[tuple[set[int], list[Any]]] = [(set(), []) for _ in range(world)]
    reports = ReportSum.nothing(world)
    for _ in range(world):
        stops = [data.draw(st.none() | st.integers(0, 8)) for _ in members]
        for rank, ((finished, samples), stop) in enumerate(zip(members, stops, strict=True)):
            samples += run(batches, reports, rank, finished, stop)
        if len(members) == 1 or all(stop is None for stop in stops):
            break
        del members[data.draw(st.integers(0, len(members) - 1))]
        known = frozenset().union(*(finished for finished, _ in members))
        reports = ReportSum(world=len(members), begun=True, finished=known)
    for rank, (finished, samples) in enumerate(members):
        samples += run(batches, reports, rank, finished)
    expected = [(stream, n) for stream, length in enumerate(lengths) for n in range(int(min(length, limit)))]
    assert sorted(sample for _, samples in members for sample in samples) == expected


def test_ranks_have_whole_streams_and_deal_out_the_rest() -> None:
    assert [share_streams(range(4), rank, 4) for rank in range(4)] == [[(rank, 0, 1)] for rank in range(4)]
    assert share_streams(range(4), 1, 3) == [(1, 0, 1), (3, 1, 3)]
    assert share_streams([2], 1, 2) == [(2, 1, 2)]
    batches = batches_of([3, 1, 2])
    finished: set[int] = set()
    assert run(batches, ReportSum.nothing(2), 1, finished) == [(1, 0), (2, 1)]
    assert finished == {1, 5, ENDS + 1 + 3, ENDS + 2 + 2 * 3}
    assert missing({0, 3, 6, *finished}, 3, math.inf) == [0, 2], "the end of stream 0 is unknown, and batch 2 is lost"
    assert missing({0, 1}, 3, 1) == [2]


def test_a_stream_that_has_become_shorter_is_noticed() -> None:
    reports = ReportSum(world=1, begun=True, finished=frozenset({1, 3, 5}))
    with pytest.raises(StreamChanged, match="stream 1 of 2 ends after 2 batches, but batch 2 existed"):
        run(batches_of([0, 2]), reports, 0, set())


def test_a_data_set_that_does_not_repeat_itself_is_refused() -> None:
    class Once(IterableDataset[int]):
        def __init__(self) -> None:
            self.items = iter(range(9))

        def __iter__(self) -> Iterator[int]:
            return self.items

    opener = StreamOpener(DataLoader(Once()), 2, 1, devices.seen_as)
    with pytest.raises(ConfigError, match="Once does not repeat itself"):
        StreamBatches(opener, 2, contextlib.nullcontext).begin(0, math.inf)
