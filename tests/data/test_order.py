"""The order of samples: ddp's where it divides, every sample once where it does not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from unicron_lightning.data.order import DataOrder, StepShape, check_loader
from unicron_lightning.errors import ConfigError


class Numbers(Dataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def order_of(loader: DataLoader[Any], devices: int = 1, accumulation: int = 1, seed: int = 0) -> DataOrder:
    return DataOrder(loader, StepShape(devices=devices, accumulation=accumulation), seed)


def epoch_of(order: DataOrder, epoch: int) -> list[list[list[int]]]:
    """Return samples by step and micro-batch."""
    steps: list[list[list[int]]] = [[] for _ in range(order.num_steps(epoch))]
    for place in (order.place(epoch, number) for number in range(order.num_micro_batches(epoch))):
        steps[place[1]].append(order.indices(*place))
    return steps


def flat(steps: list[list[list[int]]]) -> list[int]:
    return [index for step in steps for micro_batch in step for index in micro_batch]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_same_split_as_ddp(shuffle: bool, devices: int, accumulation: int) -> None:
    """Micro-batch ``a * W + r`` of a step equals ddp's batch of device r in accumulation round a."""
    data, size = Numbers(4 * devices * accumulation * 5), 4
    order = order_of(DataLoader(data, batch_size=size, shuffle=shuffle), devices, accumulation, seed=7)
    for epoch in (0, 1, 5):
        per_device = []
        for rank in range(devices):
            sampler = DistributedSampler(data, num_replicas=devices, rank=rank, shuffle=shuffle, seed=7)
            sampler.set_epoch(epoch)
            per_device.append(list(BatchSampler(sampler, size, drop_last=False)))
        expected = [
            [per_device[r][step * accumulation + a] for a in range(accumulation) for r in range(devices)]
            for step in range(len(per_device[0]) // accumulation)
        ]
        assert epoch_of(order, epoch) == expected


@pytest.mark.parametrize("size", [1, 2, 5, 17, 48, 49, 50, 63])
@pytest.mark.parametrize(("devices", "accumulation", "batch"), [(1, 1, 4), (3, 2, 4), (2, 3, 5), (4, 1, 1)])
def test_every_sample_once_whatever_divides(size: int, devices: int, accumulation: int, batch: int) -> None:
    order = order_of(DataLoader(Numbers(size), batch_size=batch, shuffle=True), devices, accumulation)
    for epoch in (0, 3):
        steps = epoch_of(order, epoch)
        assert sorted(flat(steps)) == list(range(size))
        assert all(micro_batch for step in steps for micro_batch in step), "no empty micro-batch"
        assert all(len(step) == devices * accumulation for step in steps[:-1])
        assert sum(map(len, steps)) == order.num_micro_batches(0)


@pytest.mark.parametrize("size", [11, 12, 40, 47])
def test_drop_last_leaves_out_incomplete_rounds(size: int) -> None:
    order = order_of(DataLoader(Numbers(size), batch_size=4, shuffle=True, drop_last=True), devices=3)
    samples = flat(epoch_of(order, 0))
    assert len(samples) == size // 12 * 12 == len(set(samples))


def test_no_order_of_its_own() -> None:
    """A loader without ``shuffle`` is shuffled on request; one with a sampler is not."""
    shape = StepShape(devices=2, accumulation=1)
    plain = DataLoader(Numbers(20), batch_size=2)
    for loader in (plain, DataLoader(Numbers(20), batch_size=2, shuffle=True)):
        asked = DataOrder(loader, shape, 1, shuffle=True)
        assert epoch_of(asked, 3) == epoch_of(
            order_of(DataLoader(Numbers(20), batch_size=2, shuffle=True), 2, seed=1), 3
        )
    given = DataLoader(Numbers(20), batch_size=2, sampler=list(range(19, -1, -1)))
    assert epoch_of(DataOrder(given, shape, 1, shuffle=True), 3) == epoch_of(order_of(given, 2), 3)


def test_epochs_differ_and_repeat() -> None:
    loader = DataLoader(Numbers(20), batch_size=2, shuffle=True)
    order = order_of(loader, 2, seed=1)
    first, second = epoch_of(order, 0), epoch_of(order, 1)
    assert first != second and epoch_of(order, 0) == first == epoch_of(order_of(loader, 2, seed=1), 0)
    assert epoch_of(order_of(loader, 2, seed=2), 0) != first


def test_the_training_process_random_state_is_left_alone() -> None:
    order = order_of(DataLoader(Numbers(20), batch_size=2, sampler=SubsetRandomSampler(range(10))))
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    epoch_of(order, 0)
    assert torch.equal(torch.rand(1), expected)


class Backwards(Sampler[int]):
    def __init__(self, size: int) -> None:
        self.size = size
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size - 1, -1, -1))


def test_a_users_sampler() -> None:
    sampler = Backwards(10)
    order = order_of(DataLoader(Numbers(10), batch_size=2, sampler=sampler), devices=2)
    assert epoch_of(order, 4) == [[[9, 7], [8, 6]], [[5, 3], [4, 2]], [[1], [0]]]
    assert sampler.epochs == [4]


@pytest.mark.parametrize(
    "sampler",
    [
        SubsetRandomSampler(range(5, 15)),
        WeightedRandomSampler([1.0] * 20, 10),
        RandomSampler(Numbers(20), replacement=True, num_samples=10),
        RandomSampler(Numbers(20), num_samples=10, generator=torch.Generator()),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_a_random_sampler_gives_the_same_order_on_all_ranks(sampler: Sampler[int]) -> None:
    loader = DataLoader(Numbers(20), batch_size=2, sampler=sampler)
    torch.manual_seed(1)
    first = epoch_of(order_of(loader), 2)
    torch.manual_seed(2)
    assert epoch_of(order_of(loader), 2) == first != epoch_of(order_of(loader), 3)


class Pairs(Sampler[list[int]]):
    """Batches of different sizes."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0], [1, 2], [3, 4, 5], [6]])


def test_a_users_batch_sampler_gives_the_micro_batches() -> None:
    order = order_of(DataLoader(Numbers(7), batch_sampler=Pairs()), devices=3)
    assert epoch_of(order, 0) == [[[0], [1, 2], [3, 4, 5]], [[6]]]


def test_a_plain_batch_sampler_is_like_the_default() -> None:
    batches = BatchSampler(SequentialSampler(Numbers(8)), 2, drop_last=False)
    assert epoch_of(order_of(DataLoader(Numbers(8), batch_sampler=batches), 2), 0) == [
        [[0, 2], [1, 3]],
        [[4, 6], [5, 7]],
    ]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_users_distributed_sampler_is_not_split_twice(shuffle: bool) -> None:
    sampler = DistributedSampler(Numbers(12), num_replicas=2, rank=1, shuffle=shuffle, seed=3)
    given = order_of(DataLoader(Numbers(12), batch_size=2, sampler=sampler), 2)
    default = order_of(DataLoader(Numbers(12), batch_size=2, shuffle=shuffle), 2, seed=3)
    assert epoch_of(given, 1) == epoch_of(default, 1)
    assert sorted(flat(epoch_of(given, 1))) == list(range(12))


def test_without_batching_each_sample_is_a_micro_batch() -> None:
    order = order_of(DataLoader(Numbers(5), batch_size=None), devices=2)
    assert epoch_of(order, 0) == [[[0], [1]], [[2], [3]], [[4]]]


def test_keys_of_a_mapping_need_not_be_numbers() -> None:
    order = order_of(DataLoader({"a": 1, "b": 2, "c": 3}, batch_size=1, sampler=["c", "a", "b"]), devices=2)  # type: ignore[arg-type]
    assert epoch_of(order, 0) == [[["c"], ["a"]], [["b"]]]


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([])


def test_a_sampler_without_a_length_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the sampler \w+ has no length"):
        check_loader(DataLoader(Numbers(3), sampler=Endless()))
