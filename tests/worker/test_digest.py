"""Digests of parameters, and their consequences."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from worker.simulation import Coordinator, run_threads
from worker.test_engine import CountSum

from unicron_lightning.worker.agreement import ParametersDiffer, check_parameters, odd_ranks
from unicron_lightning.worker.buckets import GradientBuckets
from unicron_lightning.worker.digest import digest_of
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.operations import Agreement
from unicron_lightning.worker.step import GradientStep


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64],
)
def test_one_bit_changes_the_digest(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensors = [torch.randint(0, 2, (5, 3)).to(dtype), torch.zeros(0, dtype=dtype), torch.ones(4).to(dtype)]
    before = digest_of(tensors)
    assert digest_of([tensor.clone() for tensor in tensors]) == before
    changed = [tensor.clone() for tensor in tensors]
    words = changed[0].view(torch.uint8).view(-1)
    words[3] ^= 1
    assert digest_of(changed) != before
    assert before == int(before) and 1 <= before <= 2**52


def test_the_order_of_tensors_counts_and_their_layout_does_not() -> None:
    one, other = torch.arange(6.0).view(2, 3), torch.ones(2, 3)
    assert digest_of([one, other]) != digest_of([other, one])
    assert digest_of([one.t().contiguous().t()]) == digest_of([one])
    assert digest_of([]) == digest_of([torch.zeros(0)])


def test_not_a_number_is_compared_by_its_bits() -> None:
    assert digest_of([torch.tensor([float("nan")])]) == digest_of([torch.tensor([float("nan")])])


@pytest.mark.parametrize(
    ("digests", "odd"),
    [
        ([5.0, 5.0, 5.0], []),
        ([0.0, 0.0], []),
        ([5.0], []),
        ([5.0, 7.0, 5.0], [1]),
        ([7.0, 5.0, 5.0, 8.0, 5.0], [0, 3]),
        ([5.0, 7.0], [0, 1]),
        ([5.0, 5.0, 7.0, 7.0], [0, 1, 2, 3]),
        ([5.0, 0.0, 5.0], []),
    ],
)
def test_who_differs_from_most(digests: list[float], odd: list[int]) -> None:
    assert odd_ranks(digests) == odd


def test_the_error_names_rank_and_node() -> None:
    check_parameters([1], 0, ("a", "b", "c"), 300)
    with pytest.raises(ParametersDiffer, match=r"at step 300 .* rank 1 on node b differ from those of the other 2"):
        check_parameters([1], 1, ("a", "b", "c"), 300)
    with pytest.raises(ParametersDiffer, match="restarts from its newest checkpoint"):
        check_parameters([0, 1], 0, ("a", "b"), 300)


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ([1], r"parameters of rank 1 on node b differ from those of the other 2 workers"),
        ([0, 1, 2], r"of the 3 workers differ \(rank 0 on node a, rank 1 on node b, rank 2 on node c\), and no value"),
    ],
)
def test_with_stop_every_worker_ends_by_the_same_error(odd: list[int], words: str) -> None:
    said = set()
    for rank in range(3):
        with pytest.raises(ParametersDiffer, match=f"at step 300 .*{words}.* The task ends because of") as caught:
            check_parameters(odd, rank, ("a", "b", "c"), 300, stops=True)
        assert caught.value.stops
        said.add(str(caught.value))
    assert len(said) == 1
    check_parameters([], 0, ("a", "b", "c"), 300, stops=True)


class Rank:
    """Runs one step with a digest of its parameters."""

    def __init__(self, engine: Engine, flipped: bool) -> None:
        self.engine = engine
        self.module = nn.Linear(2, 1).double()
        with torch.no_grad():
            self.module.weight.fill_(1.0)
            self.module.bias.fill_(float(flipped) * 1e-300)
        self.odd: list[list[int]] = []

    def __call__(self) -> Rank:
        self.engine.run(Agreement("start", lambda rank: b""))
        gradients = GradientBuckets(self.module.named_parameters(), 1, True)
        for made in (False, True):
            sums = CountSum()

            def run(micro_batch: int, sums: CountSum = sums) -> None:
                self.module(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
                sums.count()

            gradients.begin()
            digest = digest_of(self.module.parameters()) if made else 0.0
            operation = GradientStep(range(4), gradients, sums, run, digest=digest)
            self.engine.run(operation)
            self.odd.append(operation.odd)
        gradients.close()
        self.engine.close()
        return self


def test_the_commit_tells_all_ranks_who_differs() -> None:
    coordinator = Coordinator()
    ranks = [(f"w{rank}", Rank(coordinator.worker(f"w{rank}"), rank == 2)) for rank in range(3)]
    coordinator.start()
    assert [rank.odd for rank in run_threads(coordinator, ranks).values()] == [[[], [2]]] * 3
