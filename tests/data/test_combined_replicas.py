"""Several loaders as the streams of Megatron's replicas: each combined batch counts once through deaths, joins and
resumes, and all stages of a replica read the same.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from data import devices
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.utilities import CombinedLoader
from torch.utils._pytree import tree_structure
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from unicron_lightning.data.combined import CombinedOpener
from unicron_lightning.data.loader import GlobalBatch
from unicron_lightning.data.order import DataOrder, StepShape
from unicron_lightning.data.sources import same
from unicron_lightning.data.steps import StepPace, StreamSteps, TrainingLoader
from unicron_lightning.data.streams import StreamEnds, Streams
from unicron_lightning.errors import ConfigError
from unicron_lightning.replica.step import CallReport, plan_calls
from unicron_lightning.worker.rows import present

STAGES, INDEXED, BATCH = 2, 12, 2
Place = tuple[int, int]
"""Stream, and number of the batch in it."""


class Lengths(IterableDataset[Any]):
    """Device d has ``lengths[d]`` samples."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.lengths[devices.rank]):
            yield torch.tensor([devices.rank, number, random.randrange(1000)])


def loaders_of(lengths: list[int], **options: Any) -> dict[str, DataLoader[Any]]:
    return {
        "indexed": DataLoader(TensorDataset(torch.arange(INDEXED)), batch_size=BATCH, drop_last=True),
        "streamed": DataLoader(Lengths(lengths), **{"batch_size": BATCH, "drop_last": True, **options}),
    }


def opener_of(loaders: dict[str, DataLoader[Any]], mode: str, size: int) -> CombinedOpener:
    order = DataOrder(loaders["indexed"], StepShape(devices=size, accumulation=1), 0)
    parts = [(loaders["indexed"], order), (loaders["streamed"], None)]
    return CombinedOpener(parts, mode, tree_structure(dict.fromkeys(loaders, 0)), size, 1, devices.seen_as)


def under_ddp(lengths: list[int], mode: Any) -> dict[Place, Any]:
    """What each device reads under ddp, but for random numbers."""
    found = {}
    for rank, size in enumerate([len(lengths)] * len(lengths)):
        loaders = loaders_of(lengths)
        sampler: Any = DistributedSampler(range(INDEXED), size, rank, shuffle=False, drop_last=True)
        loaders["indexed"] = DataLoader(loaders["indexed"].dataset, BATCH, sampler=sampler, drop_last=True)
        with devices.seen_as(rank):
            found.update({(rank, number): batch for batch, number, _ in CombinedLoader(loaders, mode)})
    return found


class Task:
    """What all workers agree on."""

    def __init__(self, lengths: list[int], mode: str, accumulation: int) -> None:
        self.lengths, self.mode = lengths, mode
        self.shape = StepShape(devices=len(lengths), accumulation=accumulation)
        self.position = (0, 0)
        self.batches = under_ddp(lengths, mode)
        self.numbers = [sum(stream == each for each, _ in self.batches) for stream in range(len(lengths))]


class Worker:
    """A stage of a replica."""

    def __init__(self, task: Task, state: dict[str, Any] | None = None) -> None:
        self.ends, shape = StreamEnds(), task.shape
        if state is not None:
            self.ends.load_state(state)
        opener = opener_of(loaders_of(task.lengths), task.mode, shape.devices)
        self.streams = Streams(opener, shape, self.ends, one_size=True)
        first = {stream: number for stream, number in enumerate(task.numbers) if number < shape.accumulation}
        steps = StreamSteps(
            self.streams,
            StepPace(position=lambda: task.position, share=lambda streams: []),
            own=list,
            agree=lambda look: first,  # what all workers find together in the epoch's first step
            reading=contextlib.nullcontext,
        )
        self.loader = TrainingLoader(opener.loader, steps)
        self.steps: Iterator[GlobalBatch] = iter(())
        self.batch: GlobalBatch | None = None
        self.opened: set[int] = set()

    def step(self) -> GlobalBatch | None:
        """Begin a step; None at the end of the epoch."""
        if self.batch is None:
            self.steps = iter(self.loader)
        self.batch = next(self.steps, None)
        return self.batch

    def run(self, numbers: list[int]) -> dict[Place, Any]:
        """Run a call."""
        assert self.batch is not None
        found = {}
        for number in numbers:
            round_, stream = divmod(self.batch.in_full_step[number], self.streams._shape.devices)
            place = stream, self.batch.step * self.streams._shape.accumulation + round_
            found[place] = self.batch.fetch(number)
        for number in numbers:
            self.batch.finished(number)
        self.opened |= set(self.streams._open)
        return found


class Replica:
    """The workers that hold a model together, with their calls in the present step."""

    modes: ClassVar = ("min_size", "max_size", "max_size_cycle")

    def __init__(self, task: Task, state: dict[str, Any] | None = None) -> None:
        self.stages = [Worker(task, state) for _ in range(STAGES)]
        self.calls: list[tuple[int, ...]] = []
        self.done: list[dict[Place, Any]] = []

    def step(self) -> GlobalBatch | None:
        self.calls, self.done = [], []
        batches = [worker.step() for worker in self.stages]
        assert len({None if batch is None else tuple(batch.in_full_step) for batch in batches}) == 1
        return batches[0]

    def report(self) -> list[CallReport]:
        return [CallReport(calls=tuple(self.calls), began=len(self.calls))] * STAGES

    def run(self, call: tuple[int, ...], batch: GlobalBatch) -> None:
        """Run the micro-batches at some places on all stages."""
        found = [worker.run(present(call, batch.in_full_step)) for worker in self.stages]
        assert same(found[0], found[1]), "a stage has read another batch than its partner"
        self.calls.append(call)
        self.done.append(found[0])


def run_step(task: Task, replicas: list[Replica], draw: Any) -> dict[Place, Any] | None:
    """Run a step, in which replicas may die before a call or between two; None at the end of the epoch."""
    batches = [replica.step() for replica in replicas]
    batch = batches[0]
    if batch is None:
        assert batches == [None] * len(replicas)
        return None
    places = range(batch.in_full_step[-1] + 1)
    while True:
        reports = [replica.report() for replica in replicas]
        dies = draw(st.none() | st.integers(0, len(replicas) - 1)) if len(replicas) > 1 else None
        at = draw(st.integers(0, 1)) if dies is not None else 0
        for number, replica in enumerate(replicas):
            plan = plan_calls(places, len(task.lengths), reports, number)
            replica.calls, replica.done = replica.calls[: plan.kept], replica.done[: plan.kept]
            for call in plan.calls[: at if number == dies else None]:
                replica.run(call, batch)
        if dies is None:
            return {place: each for replica in replicas for done in replica.done for place, each in done.items()}
        del replicas[dies]


def commit(task: Task, replicas: list[Replica]) -> None:
    workers = [worker for replica in replicas for worker in replica.stages]
    news = [found for worker in workers if (found := worker.ends.news()) is not None]
    for worker in workers:
        worker.ends.agree(news)
    task.position = task.position[0], task.position[1] + 1


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_each_combined_batch_counts_once_and_is_that_of_ddp(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 15), min_size=1, max_size=3))
    task = Task(lengths, data.draw(st.sampled_from(Replica.modes)), data.draw(st.integers(1, 3)))
    replicas = [Replica(task) for _ in lengths]
    counted: dict[Place, Any] = {}
    for epoch in range(2):
        task.position, counted = (epoch, 0), {}
        while (done := run_step(task, replicas, data.draw)) is not None:
            assert not counted.keys() & done.keys(), "a batch counts twice"
            counted |= done
            commit(task, replicas)
            if len(replicas) < len(lengths) and data.draw(st.booleans()):  # a joiner has the members' knowledge
                replicas.append(Replica(task, replicas[0].stages[0].ends.state()))
            elif data.draw(st.integers(0, 5)) == 0:  # all resume from a checkpoint
                replicas = [Replica(task, replicas[0].stages[0].ends.state()) for _ in lengths]
        assert counted.keys() == task.batches.keys()
        for place, batch in task.batches.items():
            for name, part in batch.items():
                own = counted[place][name]
                assert (part is None) == (own is None)
                if part is not None and name == "streamed":
                    assert torch.equal(part[:, :2], own[:, :2]), "the third column is random"
                elif part is not None:
                    assert same(part, own)


def test_each_replica_reads_its_own_stream_until_another_is_lost() -> None:
    task = Task([12, 4, 12], "max_size", 1)
    replicas = [Replica(task) for _ in range(3)]
    for _ in range(4):
        assert run_step(task, replicas, lambda strategy: None) is not None
        commit(task, replicas)
    assert [[worker.opened for worker in replica.stages] for replica in replicas] == [[{0}] * 2, [{1}] * 2, [{2}] * 2]
    del replicas[0]
    assert run_step(task, replicas, lambda strategy: None) is not None
    assert sorted({number for replica in replicas for number in replica.stages[0].opened}) == [0, 1, 2]


@pytest.mark.parametrize("mode", Replica.modes)
def test_each_loader_s_batches_have_one_size(mode: str) -> None:
    """The stream's fourth batch on the second device has one sample less."""
    opener = opener_of(loaders_of([9, 7], drop_last=False), mode, 2)
    streams = Streams(opener, StepShape(devices=2, accumulation=2), StreamEnds(), one_size=True)
    streams.check()
    streams.look(0, 0, [0, 1])
    if mode == "min_size":  # the other loader ends before
        streams.look(0, 3, [0, 1])
        return
    with pytest.raises(ConfigError, match=r"^Lengths \(loader 1\): batch 3 of stream 1 has 1 samples, .* batch has 2"):
        streams.look(0, 1, [1])
    streams.close()


def test_a_loader_that_has_ended_has_no_size() -> None:
    opener = opener_of(loaders_of([30, 30]), "max_size", 2)
    streams = Streams(opener, StepShape(devices=2, accumulation=20), StreamEnds(), one_size=True)
    streams.check()
    streams.look(0, 0, [0])
    assert streams.get(0, 0, 14)["indexed"] is None
    streams.close()
