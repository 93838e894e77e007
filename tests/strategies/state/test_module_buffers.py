"""Buffers that forward changes are the same on all ranks and as in a failure-free run, whichever rank dies when."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from worker.simulation import Coordinator, Fault, Killed, run_threads

from unicron_lightning.errors import ConfigError
from unicron_lightning.worker.buckets import GradientBuckets
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.module_buffers import (
    SMALL_BYTES,
    EvaluationBuffers,
    ModuleBuffers,
    check_registered,
    restore_unsaved,
    unsaved,
)
from unicron_lightning.worker.operations import Agreement
from unicron_lightning.worker.step import GradientStep
from unicron_lightning.worker.sums import NormStatistics, StepSums, SumsLayout

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
        self.register_buffer("late", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("late_in_numpy", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("spectrum", torch.zeros(3, dtype=torch.complex128))
        self.momentum = nn.Parameter(torch.zeros(3, dtype=torch.float64), requires_grad=False)
        self.norm = Norm()
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.step >= 3:
                self.late.data.mul_(0.5).add_(x)
                self.late_in_numpy.numpy()[:] += x.numpy()
            self.spectrum.mul_(0.5j).add_(x)
            self.momentum.data = 0.5 * self.momentum + 0.5 * self.weight
            self.norm.own.mul_(0.9).add_(x)
            self.average.mul_(0.9).add_(x)
            self.codebook.data.copy_(self.codebook.data - x)
            self.replaced = self.replaced + x.to(torch.bfloat16)
            self.queue[int(self.place)] = x
            self.place.add_(1).remainder_(2)
            self.seen |= x > 0
            self.cache = torch.arange(4.0)
        others = self.late + self.late_in_numpy + self.spectrum.imag + self.momentum + self.norm.own
        return (
            self.weight * (self.average + self.codebook + self.queue.sum(0) + self.replaced.double() + others)
        ).sum()

    def kept(self) -> list[list[float]]:
        kept = [*(b for name, b in self.named_buffers() if name != "cache"), self.momentum]
        return [(torch.view_as_real(b) if b.is_complex() else b).double().flatten().tolist() for b in kept]


class Norm(nn.BatchNorm1d):
    """Has a buffer beside the statistics of its class."""

    def __init__(self) -> None:
        super().__init__(3, affine=False)
        self.register_buffer("own", torch.zeros(3, dtype=torch.float64))


def sample(step: int, micro_batch: int) -> Tensor:
    return torch.randn(3, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + micro_batch))


class Rank:
    """One rank's steps."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.module = engine, Module()
        self.settled = 0

    def __call__(self) -> Rank:
        self.engine.run(Agreement("start", lambda rank: b""))
        gradients = GradientBuckets([("weight", self.module.weight)], 1, True)
        layout, norms, buffers = SumsLayout(), NormStatistics(self.module), ModuleBuffers(self.module, frozen=True)
        for step in range(STEPS):
            self.module.step = step
            gradients.begin()
            norms.begin()
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
        module.step = step
        before = {name: b.clone() for name, b in module.named_buffers()}
        momentum, moved = module.momentum.data, None
        kept, gradient = None, torch.zeros(3, dtype=torch.float64)
        for micro_batch in range(MICRO_BATCHES):
            for name, value in before.items():
                owner, _, name = name.rpartition(".")
                module.get_submodule(owner)._buffers[name] = value.clone()
            module.momentum.data = momentum
            module.weight.grad = None
            module(sample(step, micro_batch)).backward()
            assert module.weight.grad is not None
            gradient += module.weight.grad
            kept = kept or {name: b.clone() for name, b in module.named_buffers()}
            moved = module.momentum.data if moved is None else moved
        assert kept is not None and moved is not None
        module.norm.own = kept.pop("norm.own")
        module._buffers.update({name: value for name, value in kept.items() if "." not in name})
        module.momentum.data = moved
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
    assert all(rank.settled <= 2 for rank in results), "agreed upon at the first change of each"
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


def test_large_buffers_and_frozen_parameters_are_followed_without_a_copy_of_what_does_not_change() -> None:
    module = nn.Module()
    module.train_ = nn.Parameter(torch.zeros(3 * SMALL_BYTES))
    module.still = nn.Parameter(torch.zeros(SMALL_BYTES), requires_grad=False)
    module.moves = nn.Parameter(torch.zeros(SMALL_BYTES), requires_grad=False)
    buffers = ModuleBuffers(module, frozen=True)
    carried: list[int] = []
    for step in range(4):
        buffers.begin(0, carried)
        for micro_batch in range(2):
            buffers.start_micro_batch()
            assert float(module.moves[0]) == step, "each micro-batch starts from the step's value"
            module.moves.data = module.moves + 1
            buffers.finish_micro_batch(micro_batch)
        assert buffers.changed == {2}
        for bucket in buffers.buckets:
            bucket.reduced.copy_(bucket.local)
        buffers.commit({} if carried else buffers.values)
        carried = [2]
    assert [place.kept for place in buffers._places.values()] == [False, True]
    lora = nn.Module()
    lora.base, lora.adapter = nn.Parameter(torch.zeros(9), requires_grad=False), nn.Parameter(torch.zeros(2))
    assert not ModuleBuffers(lora, frozen=True)._places, "larger than the trained ones: left alone"


def test_evaluation_leaves_buffers_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    module = Module()
    module.step = 9
    before = module.kept()
    buffers = EvaluationBuffers(module)
    for _ in range(2):
        module(torch.ones(3, dtype=torch.float64))
        buffers.undo()
        assert module.kept()[:-1] == before[:-1]
    warned = [record.args[0] for record in caplog.records if isinstance(record.args, tuple)]
    assert len(warned) == len(set(warned)) > 0


def test_evaluation_leaves_the_statistics_of_batch_norm_as_they_are() -> None:
    layer = nn.BatchNorm1d(3)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    buffers = EvaluationBuffers(layer.train())
    layer(torch.randn(4, 3))
    buffers.undo()
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


def test_a_buffer_that_is_made_in_a_step_is_refused_by_name_but_not_a_cache() -> None:
    module = Module()
    first = set(module.state_dict())
    module.register_buffer("angles", torch.zeros(2), persistent=False)
    check_registered(module, first)
    module.register_buffer("made", torch.zeros(2))
    with pytest.raises(ConfigError, match=r"'made' of shape \(2,\) was made in the first step"):
        check_registered(module, first)


def test_a_joiner_gets_the_buffers_that_no_checkpoint_has() -> None:
    donor, joiner = Module(), Module()
    for module, value in ((donor, 2.0), (joiner, 0.0)):
        module.register_buffer("hidden", torch.full((2,), value), persistent=False)
        module.cache = torch.zeros(int(value))
    restore_unsaved(joiner, unsaved(donor))
    assert joiner.hidden.tolist() == [2.0, 2.0] and joiner.cache.numel() == 0
    assert set(unsaved(donor)) == {"hidden", "cache"}
