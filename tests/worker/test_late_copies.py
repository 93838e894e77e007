"""Copies that are made while training continues are complete once settled, and not valid if training changed them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from unicron_lightning.checkpoints.beside import LateCopies
from unicron_lightning.shared_memory import MemoryPool


def test_settled_copies_are_complete() -> None:
    copies, outcomes = LateCopies(), list[Any]()
    source, target = torch.randn(1 << 20), torch.empty(1 << 20)
    copies.begin(lambda: target.copy_(source), [source], outcomes.append)  # type: ignore[arg-type, return-value]
    copies.settle()
    source.zero_()
    assert outcomes == [[]]
    assert target.abs().sum() > 0
    assert not copies.active


@pytest.mark.parametrize("changes", [False, True])
def test_sources_that_change_meanwhile(changes: bool) -> None:
    copies, outcomes, goes = LateCopies(), list[Any](), threading.Event()
    sources = [torch.ones(4), torch.ones(4, requires_grad=True)]

    def copy() -> None:
        assert goes.wait(20)

    copies.begin(copy, sources, outcomes.append)
    assert copies.active
    if changes:
        with torch.no_grad():
            sources[1].mul_(2)
    goes.set()
    copies.settle()
    (changed,) = outcomes
    assert [each is sources[1] for each in changed] == [True] * changes


def test_memory_is_taken_again_or_released() -> None:
    pool = MemoryPool()
    first = pool.take([100, 1 << 20])
    assert [len(each.content) for each in first] == [1 << 16, (1 << 20) + (1 << 16)]
    pool.give_back(first)
    again = pool.take([50, (1 << 20) + 7])
    assert again == first
    pool.give_back(again)
    for _ in range(6):
        other = pool.take([1 << 22])
        pool.give_back(other)
    last = pool.take([100])
    assert last[0] is not first[0]
    pool.give_back(last)
    pool.close()
