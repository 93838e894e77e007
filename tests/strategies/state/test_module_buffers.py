"""Buffers that forward changes are the same on all ranks and as in a failure-free run, whichever rank dies when."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from worker.simulation import Coordinator, Fault, Killed, run_threads

from unicron_lightning.strategies.metrics.sums import NormStatistics, StepSums, SumsLayout
from unicron_lightning.strategies.state.module_buffers import ModuleBuffers
from unicron_lightning.worker.buckets import GradientBuckets
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.operations import Agreement
from unicron_lightning.worker.step import GradientStep

STEPS, MICRO_BATCHES = 5, 4


class Module(nn.Module):
    """Changes its buffers in all the ways that modules do; its output depends on them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.register_buffer("average", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("codebook", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("replaced", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("queue", torch.zeros(2, 3, dtype=torch.float64))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("constant", torch.arange(3.0))
        self.register_buffer("cache", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.mul_(0.9).add_(x)
            self.codebook.data.copy_(self.codebook.data - x)
            self.replaced = self.replaced + x.to(torch.bfloat16)
            self.queue[int(self.place)] = x
            self.place.add_(1).remainder_(2)
            self.seen |= x > 0
            self.cache = torch.arange(4.0)
        return (self.weight * (self.average + self.codebook + self.queue.sum(0) + self.replaced.double())).sum()

    def kept(self) -> list[list[float]]:
        return [b.double().flatten().tolist() for name, b in self.named_buffers() if name != "cache"]


def sample(step: int, micro_batch: int) -> Tensor:
    return torch.randn(3, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + micro_batch))


class Rank:
    """One rank's steps."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.module = engine, Module()
        self.settled = 0

    def __call__(self) -> Rank:
        self.engine.run(Agreement("start", lambda rank: b""))
        gradients = GradientBuckets(self.module.named_parameters(), 1, True)
        layout, norms, buffers = SumsLayout(), NormStatistics(self.module), ModuleBuffers(self.module)
        for step in range(STEPS):
            gradients.begin()
            buffers.begin(0, layout.buffers)
            sums = StepSums(layout, norms, buffers, gradients)
            self.engine.run(GradientStep(range(MICRO_BATCHES), gradients, sums, self._runner(step, buffers, sums)))
            self.settled += bool(sums._new_buffers())
            sums.finish()
            gradients.install([True])
            with torch.no_grad():
                assert self.module.weight.grad is not None
                self.module.weight -= 0.01 * self.module.weight.grad
        gradients.close()
        self.engine.close()
        return self

    def _runner(self, step: int, buffers: ModuleBuffers, sums: StepSums) -> Any:
        def run(micro_batch: int) -> None:
            buffers.start_micro_batch()
            out = self.module(sample(step, micro_batch))
            out.backward()
            sums.add(out, [])
            buffers.finish_micro_batch(micro_batch)

        return run


def alone() -> Module:
    """Each step adopts the buffers of its first micro-batch, as ddp with a rank per micro-batch does."""
    module = Module()
    for step in range(STEPS):
        before = {name: b.clone() for name, b in module.named_buffers()}
        kept, gradient = None, torch.zeros(3, dtype=torch.float64)
        for micro_batch in range(MICRO_BATCHES):
            for name, value in before.items():
                module._buffers[name] = value.clone()
            module.weight.grad = None
            module(sample(step, micro_batch)).backward()
            assert module.weight.grad is not None
            gradient += module.weight.grad
            kept = kept or {name: b.clone() for name, b in module.named_buffers()}
        assert kept is not None
        module._buffers.update(kept)
        with torch.no_grad():
            module.weight -= 0.01 * gradient
    return module


REFERENCE = alone()


def check(ranks: list[Rank]) -> None:
    for rank in ranks:
        assert rank.module.weight.tolist() == pytest.approx(REFERENCE.weight.tolist(), rel=1e-12)
        assert rank.module.kept() == [pytest.approx(values, rel=1e-12) for values in REFERENCE.kept()]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_buffers_do_not_depend_on_the_world(world: int) -> None:
    coordinator = Coordinator()
    ranks = [(f"w{r}", Rank(coordinator.worker(f"w{r}"))) for r in range(world)]
    coordinator.start()
    results = list(run_threads(coordinator, ranks).values())
    check(results)
    assert all(rank.settled <= 1 for rank in results), "agreed upon once"
    assert REFERENCE.kept()[0] != [0.0] * 3


@pytest.mark.parametrize("seed", range(40))
def test_buffers_through_deaths(seed: int) -> None:
    draw = random.Random(seed)
    coordinator = Coordinator(seed)
    ranks = {f"w{r}": Rank(coordinator.worker(f"w{r}")) for r in range(3)}
    for name in draw.sample(["w0", "w1", "w2"], draw.randint(1, 2)):
        ranks[name].engine.fault = Fault(draw.randint(3, 60))
    coordinator.start()
    results = run_threads(coordinator, list(ranks.items()))
    check([rank for rank in results.values() if not isinstance(rank, Killed)])


def test_a_hooks_change_between_steps_counts() -> None:
    module = Module()
    buffers = ModuleBuffers(module)
    for step in range(3):
        module.average.fill_(step)
        module.constant.data.fill_(step)
        buffers.begin(0, [])
        buffers.start_micro_batch()
        module(torch.zeros(3, dtype=torch.float64))
        buffers.finish_micro_batch(0)
        assert module.average.tolist() == [step] * 3 and module.constant.tolist() == [step] * 3
        assert 0 in buffers.changed or step == 0
