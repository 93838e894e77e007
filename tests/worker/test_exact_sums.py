"""Sums that have the same bits for any division of micro-batches and any order."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from worker.simulation import Coordinator, Fault, run_threads

from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.exact_sums import BITS, HEADROOM, ExactGradients, ExactSum, ExactSums, step_sums
from unicron_lightning.worker.module_buffers import ModuleBuffers
from unicron_lightning.worker.step import GradientStep
from unicron_lightning.worker.sums import LogCall, NormStatistics, SumsLayout

TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan]


def summed(values: list[Tensor], top: int | None, parts: list[list[int]]) -> Tensor:
    """The sum of micro-batches over ranks that each have some of them, in some order."""
    ranks = []
    for numbers in parts:
        each = ExactSum(torch.empty(values[0].numel(), dtype=torch.int64))
        each.begin(top, BITS)
        for number in numbers:
            each.add(values[number])
        ranks.append(each)
    reduced = torch.zeros(values[0].numel(), dtype=torch.int64)
    apart: dict[int, Tensor] = {}
    for each in ranks:
        part = torch.empty_like(reduced)
        each.load(part)
        reduced += part
        for other, own in each.apart.items():
            apart[other] = apart.get(other, torch.zeros_like(reduced)) + own
    out = torch.empty(values[0].numel(), dtype=values[0].dtype)
    ranks[0].take(apart)
    ranks[0].write(reduced, out)
    return out.view_as(values[0])


def bits(value: Tensor) -> bytes:
    return value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def divided(chance: random.Random, number: int) -> list[list[int]]:
    order, ranks = chance.sample(range(number), number), chance.randint(1, 6)
    parts: list[list[int]] = [[] for _ in range(ranks)]
    for each in order:
        parts[chance.randrange(ranks)].append(each)
    return parts


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 1 << 30), dtype=st.sampled_from(TYPES))
def test_any_division_and_order_has_the_same_bits(seed: int, dtype: torch.dtype) -> None:
    chance = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    number, least, most = chance.randint(1, 20), *sorted((chance.uniform(-45, 6), chance.uniform(-45, 6)))
    values = []
    for _ in range(number):
        value = torch.randn(3, 5, generator=generator, dtype=torch.float64) * 2.0 ** chance.uniform(3 * least, 3 * most)
        value = -values[-1].double() if values and chance.random() < 0.2 else value
        if chance.random() < 0.15:
            value.view(-1)[chance.randrange(15)] = chance.choice(SPECIAL)
        values.append(value.to(dtype))
    top = chance.choice((None, chance.randint(-150, 60), 3))
    one = summed(values, top, [list(range(number))])
    for _ in range(3):
        assert bits(summed(values, top, divided(chance, number))) == bits(one)
    exact = torch.stack([each.double() for each in values]).sum(0).to(dtype)
    assert torch.equal(one.isnan(), exact.isnan())
    assert torch.equal(one == math.inf, exact == math.inf) or dtype != torch.float64


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_the_error_is_that_of_float32_or_less(seed: int) -> None:
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    number, scale = chance.randint(2, 32), 2.0 ** chance.randint(-100, 60)
    values = [scale * 2.0 ** chance.uniform(-6, 0) * torch.randn(64, generator=generator) for _ in range(number)]
    total = torch.zeros(64)
    for each in values:
        total += each
    true = torch.stack([each.double() for each in values]).sum(0)
    largest = math.frexp(max(float(each.abs().max()) for each in values))[1]
    for top in (None, largest + HEADROOM, largest, largest + 16):
        error = (summed(values, top, divided(chance, number)).double() - true).abs().max()
        half = true.abs().max() * 2.0**-24
        assert error <= max((total.double() - true).abs().max(), half)


def test_subnormal_and_largest_numbers() -> None:
    for dtype in TYPES:
        info = torch.finfo(dtype)
        small = torch.full((4,), max(info.smallest_normal, 2.0**-900), dtype=dtype) * 0.25
        assert torch.equal(summed([small, small], None, [[0], [1]]), 2 * small)
        large = torch.full((4,), info.max, dtype=dtype)
        assert torch.equal(summed([large, -large, small], None, [[2, 0], [1]]), small)
        assert bool((summed([large, large], None, [[0], [1]]) == math.inf).all())


def test_infinities_and_nan_are_those_of_their_elements() -> None:
    one = torch.tensor([math.inf, math.inf, -math.inf, math.nan, 1.0])
    other = torch.tensor([1.0, -math.inf, -math.inf, 1.0, 2.0])
    expected = torch.tensor([math.inf, math.nan, -math.inf, math.nan, 3.0])
    torch.testing.assert_close(summed([one, other], 3, [[0], [1]]), expected, equal_nan=True)


def test_many_micro_batches_do_not_overflow() -> None:
    sums = ExactSums(SumsLayout(), 1 << 14)
    each = ExactSum(torch.empty(1, dtype=torch.int64))
    sums.begin("one", each)
    value = torch.tensor([0.999], dtype=torch.float64)
    for _ in range(1 << 14):
        each.add(value)
    out = torch.empty(1, dtype=torch.float64)
    each.take(each.apart)
    each.write(None, out)
    assert float(out) == pytest.approx(0.999 * (1 << 14), rel=1e-12)


# ---- whole steps


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.rare = nn.Parameter(torch.ones(3))
        self.turned = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))
        self.empty = nn.Parameter(torch.ones(0, 2))
        self.single = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def loss(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        values = torch.randn(5, 4, generator=generator).to(self.rare.dtype)
        loss = self.layers(values).square().mean() * 10.0 ** (number % 9)
        more = (self.turned * (number + 1j)).abs().sum() + self.empty.sum() + self.single * number
        return loss + more + self.rare.sum() if number % 7 == 0 else loss + more


OPTIONS = ("training_step", "loss", False, True, True, True, "mean", True)


def train(net: Net, engine: Engine, steps: int, micro_batches: int) -> tuple[bytes, list[Any]]:
    """Some steps of a worker; return the bits of its parameters, and the logged values."""
    layout, found = SumsLayout(), []
    norms, buffers = NormStatistics(nn.Module()), ModuleBuffers(nn.Module())
    gradients = ExactGradients(net.named_parameters(), 128, overlap=True)
    optimizer = torch.optim.SGD(net.parameters(), 1e-9, momentum=0.9)
    for step in range(steps):
        numbers = list(range(micro_batches))
        gradients.begin()
        sums = step_sums(layout, norms, buffers, gradients, None, numbers)

        def run(number: int, base: int = step * micro_batches, sums: Any = sums) -> None:
            loss = net.loss(base + number)
            loss.backward()  # type: ignore[no-untyped-call]
            sums.add(loss, [LogCall(options=OPTIONS, value=loss.detach(), weight=1.0 + number % 3)], number)

        engine.run(GradientStep(numbers, gradients, sums, run))
        loss, calls, used = sums.finish()
        gradients.install(used)
        optimizer.step()
        found.append([loss, [(float(call.value), call.weight) for call in calls if call.value is not None], used])
    gradients.close()
    return b"".join(bits(parameter.detach()) for parameter in net.parameters()), [*found, dict(layout.tops)]


def world(size: int, seed: int = 0, deaths: Mapping[str, int] | None = None) -> list[Any]:
    """Train in a world; return the survivors' results."""
    coordinator = Coordinator(seed)
    engines = {f"w{n}": coordinator.worker(f"w{n}") for n in range(size)}
    for name, at in (deaths or {}).items():
        engines[name].fault = Fault(at)
    coordinator.start()
    results = run_threads(coordinator, [(name, partial(train, Net(), each, 6, 8)) for name, each in engines.items()])
    return [each for each in results.values() if not isinstance(each, BaseException)]


@pytest.fixture(scope="module")
def alone() -> Any:
    return world(1)[0]


def test_worlds_of_any_size_train_the_same_bits(alone: Any) -> None:
    found = [each for size in (2, 3, 5) for each in world(size)]
    assert len(found) == 10 and all(each == alone for each in found)
    assert len(alone[1]) == 7 and alone[1][-1]["rare"] > 0


def test_gradients_of_any_shape_and_type_are_summed() -> None:
    net, numbers = Net().double(), list(range(8))
    net.turned.data = net.turned.data.to(torch.complex128)
    layout = SumsLayout()
    gradients = ExactGradients(net.named_parameters(), 128, overlap=False)
    gradients.begin()
    sums = step_sums(layout, NormStatistics(nn.Module()), ModuleBuffers(nn.Module()), gradients, None, numbers)

    def run(number: int) -> None:
        loss = net.loss(number).double()
        loss.backward()  # type: ignore[no-untyped-call]
        sums.add(loss, (), number)
        loss.data.zero_()  # a module may use its tensor again

    coordinator = Coordinator(0)
    engine = coordinator.worker("w0")
    coordinator.start()
    operation = GradientStep(numbers, gradients, sums, run)
    run_threads(coordinator, [("w0", lambda: engine.run(operation))])
    mean, _, used = sums.finish()
    gradients.install(used)
    found = {name: parameter.grad for name, parameter in net.named_parameters()}
    gradients.close()
    losses = torch.stack([net.loss(number).double() for number in numbers])
    expected = torch.autograd.grad(losses.sum(), [*net.parameters()])
    assert mean == pytest.approx(float(losses.detach().mean()), rel=1e-12)
    for (name, gradient), one in zip(found.items(), expected, strict=True):
        torch.testing.assert_close(gradient, one, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("seed", range(24))
def test_deaths_change_no_bit(seed: int, alone: Any) -> None:
    chance = random.Random(seed)
    size = chance.randint(2, 6)
    deaths = {f"w{n}": chance.randint(1, 120) for n in range(1, size) if n == 1 or chance.random() < 0.6}
    found = world(size, seed, deaths)
    assert found and all(each == alone for each in found)
