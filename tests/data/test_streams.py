"""Streams of an iterable data set: what each device would read, by place, in any worker."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy
import pytest
import torch
from data import devices
from torch.utils.data import DataLoader, IterableDataset

from unicron_lightning.data.order import StepShape
from unicron_lightning.data.sources import same
from unicron_lightning.data.steps import StepPace, StreamSteps, TrainingLoader
from unicron_lightning.data.streams import StreamChanged, StreamEnds, StreamOpener, Streams
from unicron_lightning.errors import ConfigError

SHAPE = StepShape(devices=3, accumulation=2)


class Shards(IterableDataset[Any]):
    """Device d has the numbers d, d + 3, ... below ``size``, each with three random numbers."""

    def __init__(self, size: int = 30) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        for number in range(devices.rank, self.size, SHAPE.devices):
            yield number, random.random(), float(numpy.random.rand()), float(torch.rand(()))


class Once(IterableDataset[int]):
    """Can be read once only."""

    def __init__(self) -> None:
        self.items = iter(range(100))

    def __iter__(self) -> Iterator[int]:
        return self.items


def streams_of(dataset: Any, ends: StreamEnds | None = None, seed: int = 1, **options: Any) -> Streams:
    loader: DataLoader[Any] = DataLoader(dataset, **{"batch_size": 2, **options})
    return Streams(StreamOpener(loader, SHAPE.devices, seed, devices.seen_as), SHAPE, ends or StreamEnds())


def test_a_stream_is_what_its_device_reads_and_the_same_whoever_opens_it_when() -> None:
    one, other = streams_of(Shards()), streams_of(Shards())
    first = [one.get(0, stream, number) for number in range(3) for stream in range(3)]
    assert [batch[0].tolist() for batch in first[:3]] == [[0, 3], [1, 4], [2, 5]]
    random.seed(5)
    torch.manual_seed(6)
    before = random.getstate(), torch.get_rng_state()
    assert same(other.get(0, 2, 2), first[8]), "two batches are skipped"
    assert same(other.get(0, 1, 2), first[7])
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
    assert same(other.get(0, 2, 0), first[2]), "an earlier batch: the stream is opened again"
    assert not same(streams_of(Shards(), seed=2).get(0, 0, 0), first[0])
    assert devices.rank == 0


def test_batches_are_kept_to_the_end_of_the_step_and_unneeded_streams_are_closed() -> None:
    streams = streams_of(Shards())
    streams.begin_step(0, 0)
    kept = streams.get(0, 0, 0)
    streams.look(0, 1, [0, 1])
    assert streams.get(0, 0, 0) is kept
    streams.begin_step(0, 1)
    assert sorted(streams._held) == [(0, 2), (0, 3), (1, 2), (1, 3)]
    assert sorted(streams._open) == [0, 1]
    streams.look(0, 2, [0])
    streams.begin_step(0, 2)
    assert sorted(streams._open) == [0], "the last step did not need stream 1"
    streams.close()
    assert not streams._open and not streams._held


def test_ends_are_found_one_step_ahead() -> None:
    ends = StreamEnds()
    ends.begin(0, {})
    streams = streams_of(Shards(size=22), ends)  # 8, 7 and 7 numbers: four batches each, the last of 7 with one
    streams.look(0, 1, [0, 1, 2])
    assert ends.found == {}
    streams.look(0, 2, [0, 1])
    assert ends.found == {0: 4, 1: 4}
    ends.agree([{"ends": {0: 4, 1: 4, 2: 4}, "states": {}}])
    assert ends.found == {}
    assert ends.places(1, SHAPE) == [(0, 2), (1, 2), (2, 2), (0, 3), (1, 3), (2, 3)]
    assert ends.places(2, SHAPE) == []
    joined = StreamEnds()
    joined.load_state(ends.state())
    assert (joined.epoch, joined.known) == (0, {0: 4, 1: 4, 2: 4})


def test_streams_that_end_early_leave_the_others_steps_smaller() -> None:
    ends = StreamEnds()
    ends.begin(0, {1: 3, 2: 0})
    assert ends.places(1, SHAPE) == [(0, 2), (1, 2), (0, 3)]
    assert ends.places(2, SHAPE) == [(0, 4), (0, 5)]


@pytest.mark.parametrize("options", [{"batch_size": None}, {"batch_size": 2, "drop_last": True}])
def test_options_of_the_loader(options: dict[str, Any]) -> None:
    ends = StreamEnds()
    streams = streams_of(Shards(size=9), ends, **options)
    first = streams.get(0, 0, 0)[0]
    assert first == 0 if options["batch_size"] is None else first.tolist() == [0, 3]
    streams.look(0, 9, [0])
    assert ends.found == {0: 3 if options["batch_size"] is None else 1}


class Variables(IterableDataset[str]):
    def __iter__(self) -> Iterator[str]:
        yield f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']}"


def test_worker_processes_have_the_devices_rank() -> None:
    streams = streams_of(Variables(), batch_size=None, num_workers=1)
    assert [streams.get(0, stream, 0) for stream in (2, 0)] == ["2 of 3", "0 of 3"]
    streams.close()


def test_a_data_set_that_does_not_repeat_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="Once does not repeat itself"):
        streams_of(Once()).check()
    assert streams_of(Shards()).check()[0].tolist() == [0, 3]
    assert streams_of(Shards(size=0)).check() is None


def test_a_stream_that_has_become_shorter_is_noticed() -> None:
    with pytest.raises(StreamChanged, match=r"stream 1 of 3 ends after 1 batches in epoch 4, but batch 1 existed"):
        streams_of(Shards(size=6)).get(4, 1, 1)


def test_batches_of_another_size_are_refused_where_they_must_have_one() -> None:
    loader: DataLoader[Any] = DataLoader(Shards(size=10), batch_size=2)
    streams = Streams(StreamOpener(loader, SHAPE.devices, 1, devices.seen_as), SHAPE, StreamEnds(), one_size=True)
    streams.check()
    streams.look(0, 0, [0])
    with pytest.raises(ConfigError, match="Shards: batch 1 of stream 1 has 1 samples, the first batch has 2"):
        streams.look(0, 0, [1])


def test_set_epoch_is_called() -> None:
    class Epochs(Shards):
        def set_epoch(self, epoch: int) -> None:
            self.size = 3 * epoch

    ends = StreamEnds()
    streams = streams_of(Epochs(), ends)
    streams.begin_step(2, 0)
    streams.look(2, 5, [0])
    assert ends.found == {0: 1}


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({"a": torch.ones(2)}, {"a": torch.ones(2)}, True),
        ({"a": torch.ones(2)}, {"a": torch.zeros(2)}, False),
        ([torch.ones(2)], [torch.ones(2).double()], False),
        (("x", 1), ("x", 1), True),
        (torch.ones(1), 1.0, False),
        ([1], [1, 2], False),
    ],
)
def test_comparing_batches(one: Any, other: Any, expected: bool) -> None:
    assert same(one, other) is expected


def test_a_stand_in_is_a_copy_that_opens_no_stream() -> None:
    dataset = Shards(size=6)
    streams = streams_of(dataset)
    assert streams.stand_in(0, 1, 0)[0].tolist() == [1, 4], "before the check the place's own"
    streams.check()
    dataset.size = 0
    for _ in range(2):
        batch = streams.stand_in(0, 2, 5)
        assert batch[0].tolist() == [0, 3]
        batch[0].zero_()


def test_places_of_a_smaller_step() -> None:
    ends, looked = StreamEnds(), []
    ends.begin(0, {1: 3})
    streams = streams_of(Shards(), ends)
    unused: Any = None
    steps = StreamSteps(
        streams,
        StepPace(position=lambda: (0, 1), share=unused),
        own=lambda in_full_step: looked.append(in_full_step) or [2],  # type: ignore[func-returns-value]
        agree=unused,
        reading=nullcontext,
    )
    batch = next(iter(TrainingLoader(streams.opener.loader, steps)))
    assert batch.in_full_step == [0, 1, 2, 3, 5], "stream 1 has no second batch in this step"
    assert batch.own()[0].tolist() == [14, 17] and looked == [batch.in_full_step]
    streams.close()
