"""Gradient buckets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from unicron_lightning.errors import ConfigError
from unicron_lightning.worker.buckets import GradientBuckets


def buckets_of(module: nn.Module, size: int = 1 << 20, overlap: bool = True) -> GradientBuckets:
    return GradientBuckets([(n, p) for n, p in module.named_parameters() if p.requires_grad], size, overlap)


def reduce_alone(buckets: GradientBuckets) -> None:
    """Reduce in a world of one."""
    for bucket in buckets.buckets:
        bucket.load()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def test_gradients_accumulate_to_what_torch_gives() -> None:
    module, data = net(), torch.randn(6, 4)
    buckets = buckets_of(module, size=64)
    buckets.begin()
    for part in data.split(2):
        module(part).sum().backward()
    reduce_alone(buckets)
    buckets.install(buckets.used)
    ours = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    buckets.close()
    for p in module.parameters():
        p.grad = None
    for part in data.split(2):
        module(part).sum().backward()
    assert len(ours) == 6
    for mine, parameter in zip(ours, module.parameters(), strict=True):
        assert parameter.grad is not None and torch.allclose(mine, parameter.grad)


def test_the_next_step_starts_from_zero() -> None:
    module = net()
    buckets = buckets_of(module)
    firsts = []
    for _ in range(2):
        buckets.begin()
        module(torch.ones(1, 4)).sum().backward()
        reduce_alone(buckets)
        firsts.append(torch.cat([b.reduced for b in buckets.buckets]))
        buckets.install(buckets.used)
    assert len(firsts) == 2 and torch.equal(*firsts)
    buckets.close()


@pytest.mark.parametrize(("size", "expected"), [(1, 6), (1 << 20, 1), (8 * 8 * 4, 2)])
def test_size(size: int, expected: int) -> None:
    buckets = buckets_of(net(), size=size)
    assert len(buckets.buckets) == expected
    assert sum(b.reduced.numel() for b in buckets.buckets) == sum(p.numel() for p in net().parameters())
    buckets.close()


def test_the_first_bucket_is_small() -> None:
    """Its reduction starts early in backward."""
    module = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
    buckets = buckets_of(module, size=1 << 25)
    assert [b.reduced.numel() for b in buckets.buckets] == [512 * 512, 3 * 512 * 512]
    buckets.close()


def test_one_dtype_per_bucket() -> None:
    module = net()
    module[2].to(torch.bfloat16)
    buckets = buckets_of(module)
    assert [b.reduced.dtype for b in buckets.buckets] == [torch.float32, torch.bfloat16, torch.float32]
    buckets.close()


def launches(module: nn.Module, backward: Any, overlap: bool = True, order: list[int] | None = None) -> Any:
    buckets = buckets_of(module, size=1, overlap=overlap)
    buckets.begin()
    launched: list[int] = []
    buckets.arm(list(range(len(buckets.buckets))) if order is None else order, launched.append)
    try:
        backward()
        return launched, buckets.finish()
    finally:
        buckets.close()


def test_buckets_are_launched_in_backward_in_order() -> None:
    module = net()
    assert launches(module, lambda: module(torch.ones(1, 4)).sum().backward()) == ([0, 1, 2, 3, 4, 5], [])
    assert launches(module, lambda: module(torch.ones(1, 4)).sum().backward(), order=[2, 5]) == ([2, 5], [])


def test_without_overlap_all_are_left_to_the_end() -> None:
    module = net()
    assert launches(module, lambda: module(torch.ones(1, 4)).sum().backward(), overlap=False) == ([], list(range(6)))


def test_an_unused_parameter_holds_back_those_after_it() -> None:
    """The order of launches must be the same on all ranks, used or not."""
    module = net()
    launched, left = launches(module, lambda: module[4](torch.ones(1, 8)).sum().backward())
    assert (sorted(launched), left) == ([0, 1], [2, 3, 4, 5])


def test_unused_parameters_get_no_gradient() -> None:
    module = net()
    buckets = buckets_of(module)
    buckets.begin()
    module[2](torch.ones(1, 8)).sum().backward()
    assert buckets.used == [False, False, True, True, False, False]
    reduce_alone(buckets)
    buckets.install(buckets.used)
    assert [p.grad is None for p in module.parameters()] == [True, True, False, False, True, True]
    buckets.begin()
    assert not any(buckets.used)
    buckets.close()


def test_a_step_begins_with_nothing_of_the_last_one() -> None:
    module = net()
    buckets = buckets_of(module)
    for _ in range(2):
        buckets.begin()
        for _ in range(3):
            module(torch.ones(1, 4)).sum().backward()
        reduce_alone(buckets)
    single = net()
    (3 * single(torch.ones(1, 4)).sum()).backward()
    expected = torch.cat([p.grad.reshape(-1) for p in single.parameters() if p.grad is not None]).sum()
    torch.testing.assert_close(torch.stack([bucket.reduced.sum() for bucket in buckets.buckets]).sum(), expected)
    buckets.close()


def test_a_parameter_used_by_another_rank_keeps_its_gradient() -> None:
    module = net()
    buckets = buckets_of(module)
    buckets.begin()
    for bucket in buckets.buckets:
        bucket.reduced.fill_(1.0)  # from other ranks
    buckets.install([False] * 6)
    assert all(p.grad is not None and p.grad.eq(1).all() for p in module.parameters())
    buckets.close()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x))


def test_tied_weights_are_one_parameter() -> None:
    module = Tied()
    buckets = buckets_of(module, size=1)
    assert len(buckets.parameters) == 1
    buckets.begin()
    launched: list[int] = []
    buckets.arm([0], launched.append)
    module(torch.tensor([1, 2])).sum().backward()
    assert buckets.finish() == [] and launched == [0]
    buckets.close()


class Reentrant(nn.Module):
    """The same layer inside and outside a reentrant checkpoint: its gradient arrives in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(checkpoint(self.layer, x, use_reentrant=True))


def test_a_gradient_after_its_bucket_was_launched_is_an_error() -> None:
    module, data = Reentrant(), torch.ones(1, 3, requires_grad=True)
    with pytest.raises(ConfigError, match=r"parameter 'layer\.(weight|bias)' .*overlap=False"):
        launches(module, lambda: module(data).sum().backward())


def test_the_error_does_not_stay() -> None:
    module, data = Reentrant(), torch.ones(1, 3, requires_grad=True)
    buckets = buckets_of(module, size=1)
    for _ in range(2):
        buckets.begin()
        buckets.arm([0, 1], lambda bucket: None)
        module(data).sum().backward()
        with pytest.raises(ConfigError):
            buckets.finish()
    buckets.begin()
    buckets.arm([0, 1], lambda bucket: None)
    module.layer(data).sum().backward()
    assert buckets.finish() == []
    buckets.close()


def test_without_overlap_late_gradients_are_fine() -> None:
    module, data = Reentrant(), torch.ones(1, 3, requires_grad=True)
    assert launches(module, lambda: module(data).sum().backward(), overlap=False) == ([], [0, 1])


def test_matches_the_parameters_it_was_made_for() -> None:
    module = net()
    buckets = buckets_of(module)
    assert buckets.matches(list(module.parameters()))
    assert not buckets.matches(list(module.parameters())[1:])
    assert not buckets.matches(list(net().parameters()))
    buckets.close()


def test_a_sparse_gradient_into_a_bucket() -> None:
    """Sparse gradients add up as such, and are made dense for the reduction."""
    module = nn.Embedding(5, 3, sparse=True)
    buckets = buckets_of(module)
    buckets.begin()
    module(torch.tensor([1])).sum().backward()
    module(torch.tensor([1])).sum().backward()
    reduce_alone(buckets)
    assert buckets.buckets[0].reduced.sum() == 6
    buckets.close()


def test_a_renewed_bucket_leaves_the_old_buffer_to_the_library() -> None:
    buckets = buckets_of(net())
    old = buckets.buckets[0].reduced
    buckets.buckets[0].renew()
    assert buckets.buckets[0].reduced.data_ptr() != old.data_ptr()
    buckets.close()


@pytest.mark.parametrize("keep", [lambda gradient: gradient, lambda gradient: gradient.detach()])
def test_gradients_that_an_optimizer_keeps_stay_as_they_are(keep: Any) -> None:
    parameter = nn.Parameter(torch.ones(2))
    buckets = GradientBuckets([("p", parameter)], 1 << 20, overlap=False)
    kept, memory = [], set()
    for step in range(3):
        buckets.begin()
        parameter.grad = torch.full((2,), float(step))
        buckets.buckets[0].load()
        buckets.install([True])
        memory.add(buckets.buckets[0].reduced.data_ptr())
        if step < 1:
            kept.append(keep(parameter.grad))
    assert [each.tolist() for each in kept] == [[0.0, 0.0]]
    assert len(memory) == 2, "memory that nothing keeps is used again"


def test_a_gradient_has_its_parameters_order_of_memory() -> None:
    parameter = nn.Parameter(torch.ones(2, 3, 2, 2).to(memory_format=torch.channels_last))
    buckets = GradientBuckets([("p", parameter)], 1 << 20, overlap=False)
    buckets.begin()
    parameter.grad = torch.arange(24.0).view(2, 3, 2, 2)
    buckets.buckets[0].load()
    buckets.install([True])
    assert parameter.grad.stride() == parameter.stride()
    assert torch.equal(parameter.grad, torch.arange(24.0).view(2, 3, 2, 2))
