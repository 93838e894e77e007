"""Several loaders as one stream: each device's batches are those of Lightning's `CombinedLoader`, in any worker."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import random
from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Any

import pytest
import torch
from data import devices
from lightning.pytorch.utilities import CombinedLoader
from torch.utils._pytree import tree_structure
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from unicron_lightning.data.combined import CombinedOpener
from unicron_lightning.data.order import CombinedOrder, DataOrder, StepShape
from unicron_lightning.data.passes import StreamBatches
from unicron_lightning.data.sources import Batches, as_loader, same
from unicron_lightning.data.streams import StreamEnds, Streams
from unicron_lightning.errors import ConfigError

DEVICES, EPOCH = 2, 3
SHAPE = StepShape(devices=DEVICES, accumulation=1)
MODES = ("min_size", "max_size", "max_size_cycle")


class Stream(IterableDataset[Any]):
    """Device d has the numbers 100, 101, ... of its length, each with the epoch and a random number."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.lengths[devices.rank]):
            yield 100 + number, (self.epochs or [0])[-1], random.random()


class Drawn(Sampler[int]):
    """A user's sampler that draws random numbers."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(8), 8))

    def __len__(self) -> int:
        return 8


def numbers(size: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(size)), **{"batch_size": 2, **options})


def opener_of(loaders: list[Any], mode: str = "max_size_cycle", *, shuffle: bool = False) -> CombinedOpener:
    parts: list[tuple[DataLoader[Any], DataOrder | None]] = []
    for loader in (as_loader(each, DEVICES) for each in loaders):
        stream = isinstance(loader.dataset, IterableDataset)
        parts.append((loader, None if stream else DataOrder(loader, SHAPE, 5, shuffle)))
    structure = tree_structure(tuple(range(len(loaders))))
    return CombinedOpener(parts, mode, structure, DEVICES, 1, devices.seen_as)


def read(opener: CombinedOpener, stream: int, epoch: int = EPOCH) -> list[Any]:
    reader, found = opener.open(epoch, stream), []
    with contextlib.suppress(StopIteration):
        while True:
            found.append(reader.read())
    reader.close()
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("lengths", [(4, 4), (30, 30), (9, 2)])
def test_a_device_reads_what_it_does_under_ddp(mode: Any, shuffle: bool, lengths: tuple[int, ...]) -> None:
    mine = opener_of([numbers(16), DataLoader(Stream(*lengths), batch_size=2)], mode, shuffle=shuffle)
    for rank in reversed(range(DEVICES)):
        sampler: Any = DistributedSampler(range(16), DEVICES, rank, shuffle=shuffle, seed=5)
        sampler.set_epoch(EPOCH)
        ddp = CombinedLoader([numbers(16, sampler=sampler), DataLoader(Stream(*lengths), batch_size=2)], mode)
        with devices.seen_as(rank):
            theirs = [batch for batch, _, _ in ddp]
        found = read(mine, rank)
        assert len(found) == len(theirs) > 0
        for (indexed, streamed), (their_indexed, their_streamed) in zip(found, theirs, strict=True):
            assert same(indexed, their_indexed)
            assert (streamed is None) == (their_streamed is None)
            assert streamed is None or same(streamed[0], their_streamed[0])


def test_sequences_of_batches_are_dealt_out() -> None:
    batches = Batches([torch.tensor([number]) for number in range(5)])
    opener = opener_of([DataLoader(Stream(3, 3), batch_size=None), batches], "max_size")
    assert [[None if own is None else own.tolist() for _, own in read(opener, device)] for device in range(2)] == [
        [[0], [2], [4]],
        [[1], [3], None],
    ]


def test_random_numbers_belong_to_the_stream() -> None:
    """The order of a user's sampler is drawn once in an epoch, by the stream that is opened first."""
    random.seed(1)
    before = random.getstate()
    one, other = (opener_of([numbers(8, sampler=Drawn()), DataLoader(Stream(20, 20))]) for _ in range(2))
    first = [read(one, 0), read(one, 1)]
    again = [read(other, 1), read(other, 0)]
    assert same(first, again[::-1])
    assert random.getstate() == before
    drawn = torch.cat([batch[0] for part in first for batch, _ in part[:2]])
    assert drawn.sort().values.tolist() == list(range(8)), "each index is on one device, in the first pass"
    assert not same(first[0], read(one, 0, EPOCH + 1))
    values = [float(streamed[2]) for _, streamed in first[0]]
    assert len(set(values)) == 20


def test_an_empty_loader_ends_the_epoch_and_a_loader_of_none_is_none() -> None:
    assert read(opener_of([numbers(0), DataLoader(Stream(4, 4))]), 0) == []
    assert len(read(opener_of([numbers(0), DataLoader(Stream(4, 4))], "max_size"), 0)) == 4
    assert read(opener_of([numbers(1), DataLoader(Stream(4, 4))]), 1) == [], "one sample for two devices"


def test_streams_of_several_loaders_are_skipped_and_their_epoch_is_set_once() -> None:
    stream = Stream(9, 7)
    opener = opener_of([numbers(6), DataLoader(stream), DataLoader(Stream(2, 2))], "max_size")
    assert opener.name == "TensorDataset with Stream with Stream"
    ends = StreamEnds()
    streams = Streams(opener, StepShape(devices=DEVICES, accumulation=2), ends)
    streams.begin_step(4, 0)
    late = streams.get(4, 1, 6)
    assert late[0] is None and late[2] is None and same(late[1][:2], [torch.tensor([106]), torch.tensor([4])])
    streams.look(4, 3, [1])
    assert ends.found == {1: 7} and stream.epochs == [4]
    assert opener.loader.batch_size == 2 + 1 + 1
    streams.close()


def test_loaders_that_do_not_repeat_themselves_are_refused() -> None:
    class Once(IterableDataset[int]):
        items = iter(range(9))

        def __iter__(self) -> Iterator[int]:
            return self.items

    with pytest.raises(ConfigError, match=r"TensorDataset with \S*Once does not repeat itself"):
        opener_of([numbers(6), DataLoader(Once())]).check()
    opener_of([numbers(6), DataLoader(Stream(9, 7))]).check()


def test_a_pass_of_streams_is_divided() -> None:
    opener = opener_of([numbers(6, batch_size=1), DataLoader(Stream(5, 2), batch_size=None)], "max_size")
    batches = StreamBatches(opener, DEVICES, contextlib.nullcontext)
    batches.begin(0, math.inf)
    found = []
    for rank in range(3):
        batches.plan(frozenset(), rank, 3, set())
        found += [batches.get(number) for number, _ in batches.rows()]
    assert sorted(int(own[0]) for own, _ in found if own is not None) == list(range(6))
    assert sorted(part[0] for _, part in found if part is not None) == [100, 100, 101, 101, 102, 103, 104]


class Resumable(Stream):
    """Holds the place of its iterator."""

    def __init__(self, *lengths: int) -> None:
        super().__init__(*lengths)
        self.read = 0

    def __iter__(self) -> Iterator[Any]:
        for item in islice(super().__iter__(), self.read, None):
            self.read += 1
            yield item
        self.read = 0

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.read = state["read"]


def test_states_are_not_used() -> None:
    opener = opener_of([numbers(6), StatefulDataLoader(Resumable(9, 7))])
    opener.check()
    assert not opener.stateful
    assert [[int(part[0]) for _, part in read(opener, stream)] for stream in (0, 1)] == [
        [*range(100, 109)],
        [*range(100, 107)],
    ]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("persistent", [False, True])
def test_worker_processes_end_with_the_iterators_that_they_serve(persistent: bool) -> None:
    indexed = numbers(8, num_workers=1, persistent_workers=persistent)
    opener = opener_of([indexed, DataLoader(Stream(40, 40), batch_size=4, num_workers=1)])
    readers = [opener.open(0, 0), opener.open(0, 0)]
    used = set()
    for _ in range(5):  # the first loader has two batches on a device
        assert same(*(reader.read() for reader in readers))
        used |= {child.pid for child in multiprocessing.active_children()}
        assert len(multiprocessing.active_children()) == 4
    assert len(used) == (4 if persistent else 8)
    for reader in readers:
        reader.close()
    assert not multiprocessing.active_children()


def test_numbers_of_combined_batches() -> None:
    orders = [DataOrder(numbers(size), SHAPE, 0) for size in (12, 8)]
    for mode, size in (("min_size", 4), ("max_size", 6), ("max_size_cycle", 6)):
        order = CombinedOrder(orders, mode, math.inf, StepShape(devices=DEVICES, accumulation=2))
        assert order.num_micro_batches(0) == size
        assert CombinedOrder(orders, mode, 3, SHAPE).num_micro_batches(0) == 3
        places = [order.place(1, number) for number in range(size)]
        assert all(one < other for one, other in pairwise(places)) and places[4:5] in ([], [(1, 1, 0)])
