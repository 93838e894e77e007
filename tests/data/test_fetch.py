"""Fetching by number, with and without worker processes, while the share changes."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from unicron_lightning.data.fetch import Fetcher
from unicron_lightning.data.loader import GlobalBatch
from unicron_lightning.data.order import DataOrder, StepShape
from unicron_lightning.data.passes import EvaluationLoader, IndexedBatches
from unicron_lightning.data.steps import IndexedSteps, StepPace, TrainingLoader
from unicron_lightning.worker.rows import ReportSum, share

SHAPE = StepShape(devices=2, accumulation=2)


class Noisy(Dataset[Any]):
    """Samples with random augmentation and the process that made them."""

    def __init__(self, size: int = 48) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, float, int]:
        return index, float(torch.rand(())), os.getpid()


class World:
    """The parts of strategy and engine that a loader uses."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self.epoch, self.step = 0, 0
        self.boundaries = 0

    def share(self, micro_batches: range) -> list[int]:
        return share(micro_batches, self.rank, self.size)

    def boundary(self) -> None:
        self.boundaries += 1

    def loader(self, loader: DataLoader[Any], limit: float = math.inf) -> TrainingLoader:
        order = DataOrder(loader, SHAPE, 0)
        pace = StepPace(position=lambda: (self.epoch, self.step), share=self.share, boundary=self.boundary)
        return TrainingLoader(loader, IndexedSteps(order, partial(Fetcher, loader, order, 1), pace, lambda: limit))


def run(world: World, loader: TrainingLoader) -> Iterator[tuple[GlobalBatch, list[Any]]]:
    """Run an epoch as the training loop does."""
    for batch in loader:
        yield batch, [batch.fetch(m) for m in world.share(batch.micro_batches)]
        world.step += 1
    world.epoch, world.step = world.epoch + 1, 0


def content(batches: list[Any]) -> list[tuple[list[int], list[float]]]:
    return [(index.tolist(), noise.tolist()) for index, noise, _ in batches]


def expected(size: int = 48) -> dict[tuple[int, int, int], tuple[list[int], list[float]]]:
    world = World()
    loader = world.loader(DataLoader(Noisy(size), batch_size=3, shuffle=True))
    return {
        (epoch, batch.step, m): content([data])[0]
        for epoch in range(2)
        for batch, parts in run(world, loader)
        for m, data in enumerate(parts)
    }


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_two_epochs_are_the_same_with_and_without_workers(workers: int, persistent: bool) -> None:
    if persistent and not workers:
        pytest.skip("needs workers")
    reference, world = expected(), World(rank=1, size=2)
    user = DataLoader(Noisy(), batch_size=3, shuffle=True, num_workers=workers, persistent_workers=persistent)
    loader = world.loader(user)
    processes: list[set[int]] = []
    for epoch in range(2):
        processes.append(set())
        for batch, parts in run(world, loader):
            assert content(parts) == [reference[epoch, batch.step, m] for m in (1, 3)]
            processes[-1] |= {pid for part in parts for pid in part[2].tolist()}
    loader.close()
    assert world.boundaries == 2 * (4 + 1)
    assert len(processes[0]) == max(1, workers) and (os.getpid() in processes[0]) == (workers == 0)
    if workers:
        assert (processes[0] == processes[1]) == persistent


@pytest.mark.parametrize("workers", [0, 2])
def test_a_share_that_changes_midway(workers: int) -> None:
    """Rank 1 of 3 computes the rest of rank 2's micro-batches, then is rank 0 of 1."""
    reference, world = expected(96), World(rank=1, size=3)
    loader = world.loader(
        DataLoader(Noisy(96), batch_size=3, shuffle=True, num_workers=workers, prefetch_factor=4 if workers else None)
    )
    seen = []
    for batch, parts in run(world, loader):
        assert content(parts) == [reference[0, batch.step, m] for m in world.share(batch.micro_batches)]
        seen += [index for part in parts for index in part[0].tolist()]
        if batch.step == 2:
            extra = batch.fetch(2)  # another rank's
            assert content([extra]) == [reference[0, 2, 2]]
            world.rank, world.size = 0, 2
        if batch.step == 4:
            world.rank, world.size = 0, 1
    loader.close()
    assert len(seen) == len(set(seen))


def test_a_fetch_does_not_touch_the_random_state_of_training() -> None:
    world = World()
    loader = world.loader(DataLoader(Noisy(), batch_size=3))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    for _ in run(world, loader):
        pass
    assert torch.equal(torch.get_rng_state(), before)


def test_start_in_the_middle_of_an_epoch() -> None:
    reference, world = expected(), World()
    world.epoch, world.step = 1, 2
    loader = world.loader(DataLoader(Noisy(), batch_size=3, shuffle=True, num_workers=1))
    places = []
    for batch, parts in run(world, loader):
        places.append((batch.epoch, batch.step))
        assert content(parts) == [reference[1, batch.step, m] for m in range(4)]
    loader.close()
    assert places == [(1, 2), (1, 3)]


def test_limit() -> None:
    loader = World().loader(DataLoader(Noisy(), batch_size=3), limit=3)
    assert len(loader) == 2
    assert len(World().loader(DataLoader(Noisy(), batch_size=3), limit=9)) == 4


def test_leaving_an_epoch_early_ends_its_requests() -> None:
    reference, world = expected(96), World()
    loader = world.loader(DataLoader(Noisy(96), batch_size=3, shuffle=True, num_workers=1, persistent_workers=True))
    next(iter(run(world, loader)))
    world.epoch, world.step = 1, 0
    batch, parts = next(iter(run(world, loader)))
    assert content(parts) == [reference[1, 0, m] for m in range(4)] and (batch.epoch, batch.step) == (1, 0)
    loader.close()


class Wholesale(Noisy):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [index * 10 for index in indices]


@pytest.mark.parametrize(
    ("loader", "first"),
    [
        (DataLoader(Wholesale(), batch_size=3), [0, 20, 40]),
        (
            DataLoader(Noisy(), batch_size=3, collate_fn=lambda samples: torch.tensor([s[0] for s in samples])),
            [0, 2, 4],
        ),
        (DataLoader(torch.arange(48), batch_size=None), 0),  # type: ignore[arg-type]
    ],
    ids=["getitems", "collate", "unbatched"],
)
def test_the_users_way_of_collating(loader: DataLoader[Any], first: Any) -> None:
    order = DataOrder(loader, SHAPE, 0)
    fetcher = Fetcher(loader, order, 1, lambda place: iter(()))
    assert fetcher.get((0, 0, 0)).tolist() == first


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_batches_by_number(workers: int) -> None:
    started: list[int] = []
    user = DataLoader(Noisy(20), batch_size=3, num_workers=workers)
    order = DataOrder(user, StepShape(devices=2, accumulation=1), 0)
    batches = IndexedBatches(order, partial(Fetcher, user, order, 1))
    reports = ReportSum(world=1, finished=frozenset({1, 3, 4, 6, 7}))
    loader = EvaluationLoader(user, batches, lambda loader: loader.todo(reports, 0), started.append)
    assert len(loader) == 4  # a device's, as with ddp
    loader.begin(0, 2)
    assert batches.number == 4
    loader.begin(0, math.inf)
    assert batches.number == 8
    for _ in range(2):
        assert [batch[0].tolist() for batch in loader] == [[0, 2, 4], [6, 8, 10], [13, 15, 17]]
        assert loader.batches.get(6)[0].tolist() == [18]
    loader.end()
    loader.close()
    assert started == [0, 2, 5] * 2


class Summed(Noisy):
    """Samples of a kernel whose bits depend on the number of threads, and that number."""

    def __getitem__(self, index: int) -> Any:
        values = torch.rand(200_000)
        return torch.dot(values, values).item(), torch.get_num_threads()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_micro_batch_that_is_fetched_here_has_the_bits_of_a_worker_process(workers: int) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    loader = DataLoader(Summed(), batch_size=2, num_workers=workers)
    ahead = [(0, 0, number) for number in range(3)]
    fetcher = Fetcher(loader, DataOrder(loader, SHAPE, 0), 1, lambda place: iter(ahead))
    try:
        expected = [fetcher.get(place) for place in ahead]
        here = [fetcher._fetch_here(place) for place in ahead]
        assert [[each.tolist() for each in batch] for batch in here] == [[e.tolist() for e in b] for b in expected]
        assert {number for _, numbers in here for number in numbers.tolist()} == {1 if workers else 2}
        assert torch.get_num_threads() == 2
    finally:
        fetcher.close()
        torch.set_num_threads(threads)


class Opened(Dataset[Any]):
    """Samples from a file that each worker process opens by itself."""

    opened = 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[int, int, bool]:
        info = get_worker_info()
        return index, self.opened, info is not None and info.dataset is self


def open_file(worker: int) -> None:
    info = get_worker_info()
    assert info is not None and isinstance(info.dataset, Opened)
    info.dataset.opened = 10 + worker


@pytest.mark.parametrize("init", [open_file, None])
def test_a_worker_process_sees_the_users_data_set(init: Any) -> None:
    loader = World().loader(DataLoader(Opened(), batch_size=3, num_workers=1, worker_init_fn=init))
    batch = next(iter(loader)).fetch(0)
    loader.close()
    assert batch[1].tolist() == [10 if init else 0] * 3
    assert batch[2].all()
