"""Data that is read once, as by Lightning with one device: how much is read when, and what is kept."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from data import devices
from torch.utils.data import DataLoader, IterableDataset

from unicron_lightning.data.loader import GlobalBatch
from unicron_lightning.data.order import StepShape
from unicron_lightning.data.passes import StreamBatches
from unicron_lightning.data.sources import as_loader
from unicron_lightning.data.steps import SingleReading, StepPace, TrainingLoader
from unicron_lightning.data.streams import StreamEnds, StreamOpener, Streams
from unicron_lightning.errors import ConfigError


class Numbers:
    """An iterator of numbered batches."""

    def __init__(self, number: int | None = None) -> None:
        self.read = 0
        self._items = itertools.count() if number is None else iter(range(number))

    def __iter__(self) -> Numbers:
        return self

    def __next__(self) -> torch.Tensor:
        item = next(self._items)
        self.read += 1
        return torch.tensor([item])


class SizedNumbers(Numbers):
    def __len__(self) -> int:
        return 5


class Run:
    """The steps of an epoch over a loader that is read once."""

    def __init__(self, users: Any, accumulation: int = 1, limit: int | None = None) -> None:
        shape = StepShape(devices=1, accumulation=accumulation)
        opener = StreamOpener(as_loader(users, 1, once=True), 1, 1, devices.seen_as, once=True)
        self.ends, self.epoch, self.step, self.last = StreamEnds(), 0, 0, list[int]()
        steps = SingleReading(
            Streams(opener, shape, self.ends),
            StepPace(position=lambda: (self.epoch, self.step), share=list),
            limit=limit,
            own=list,
            agree=lambda look: look(),
            reading=nullcontext,
            last=lambda: self.last.append(self.step),
        )
        self.loader = TrainingLoader(opener.loader, steps)

    def steps(self, most: int | None = None) -> Iterator[GlobalBatch]:
        for batch in itertools.islice(self.loader, most):
            yield batch
            self.step += 1
        self.epoch, self.step = self.epoch + 1, 0


def test_one_batch_is_read_ahead_if_the_end_is_unknown() -> None:
    numbers = Numbers(4)
    run = Run(numbers)
    with pytest.raises(TypeError, match="Numbers is a stream, which has no length"):
        len(run.loader)
    seen = [(batch.own().item(), numbers.read) for batch in run.steps()]
    assert seen == [(0, 2), (1, 3), (2, 4), (3, 4)] and run.last == [3]
    assert list(run.steps()) == [], "a second epoch has what is left"


@pytest.mark.parametrize(("users", "limit"), [(SizedNumbers(), None), (Numbers(), 5)])
def test_none_is_read_ahead_with_a_length_or_a_limit(users: Any, limit: int | None) -> None:
    run = Run(users, limit=limit)
    assert [(batch.own().item(), users.read) for batch in run.steps()] == [(n, n + 1) for n in range(5)]
    assert len(run.loader) == 5 and run.last == [4]
    assert [batch.own().item() for batch in run.steps(2)] == [5, 6] and users.read == 7


def test_all_batches_of_a_step_are_read_when_it_begins() -> None:
    numbers = Numbers(5)
    run = Run(numbers, accumulation=2)
    seen = [(batch.micro_batches, numbers.read) for batch in run.steps()]
    assert seen == [(range(2), 3), (range(2), 5), (range(1), 5)]


def test_length_in_steps() -> None:
    run = Run(SizedNumbers(), accumulation=2, limit=3)
    assert len(run.loader) == 3, "Lightning asks for the length without a limit, before it iterates"
    next(iter(run.loader))
    assert len(run.loader) == 2


def test_a_step_keeps_its_batches() -> None:
    run = Run(Numbers(5), accumulation=2)
    steps = list(run.steps())
    assert [[step.fetch(number).item() for number in step.micro_batches] for step in steps] == [[0, 1], [2, 3], [4]]


def test_an_end_that_a_fit_before_has_found_is_forgotten() -> None:
    run = Run(Numbers(3))
    run.ends.begin(0, {0: 2})
    assert [batch.own().item() for batch in run.steps()] == [0, 1, 2]


def test_evaluations_read_no_more_than_their_limit() -> None:
    numbers = Numbers()
    opener = StreamOpener(as_loader(numbers, 1, once=True), 1, 1, devices.seen_as, once=True)
    batches = StreamBatches(opener, 1, nullcontext)
    for turn in range(2):
        batches.begin(0, 3)
        assert numbers.read == 3 * turn, "nothing is read to check it"
        batches.plan(frozenset(), 0, 1, set())
        seen = [batches.get(number).item() for number, _ in batches.rows()]
        assert seen == [3 * turn, 3 * turn + 1, 3 * turn + 2] and numbers.read == 3 * turn + 3
    assert batches.rounds() is None


class Changing(IterableDataset[int]):
    """Yields other numbers each time."""

    def __init__(self) -> None:
        self._items = itertools.count()

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(self._items, 4)

    def __len__(self) -> int:
        return 4


def test_data_that_does_not_repeat_itself_has_its_length() -> None:
    loader: DataLoader[int] = DataLoader(Changing(), batch_size=2)
    run = Run(loader)
    assert len(run.loader) == 2
    assert [batch.own().tolist() for _ in range(2) for batch in run.steps()] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert StreamOpener(loader, 1, 1, devices.seen_as).length() is None


def test_iterators_are_refused_where_batches_are_read_again() -> None:
    with pytest.raises(ConfigError, match="the data is a Numbers, an iterator that can be read once"):
        as_loader(Numbers(3), 1)
    assert list(as_loader(Numbers(3), 1, once=True)) == [0, 1, 2]
    with pytest.raises(ConfigError, match="the data is a int, which can't be iterated"):
        as_loader(3, 1, once=True)
