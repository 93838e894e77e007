"""Digests of parameters, and their consequences."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from worker.simulation import Coordinator, run_threads
from worker.test_engine import CountSum

from unicron_lightning.worker.agreement import (
    NO_DIGEST,
    Difference,
    ParametersDiffer,
    StateDigest,
    check_parameters,
    first_unequal,
    odd_ranks,
    part_of,
    parts_of,
)
from unicron_lightning.worker.buckets import GradientBuckets
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.operations import Agreement
from unicron_lightning.worker.step import GradientStep


def digest_of(tensors: list[torch.Tensor]) -> float:
    """The digest of a state that has these tensors."""
    return StateDigest(parts=parts_of({f"{place:02}": each for place, each in enumerate(tensors)})).row[0]


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
    assert digest_of([torch.zeros(0)]) == digest_of([torch.zeros(0, 2)]) and NO_DIGEST.row == (0.0, 0.0, 0.0)


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


@pytest.mark.parametrize(
    ("digests", "joined", "odd"),
    [
        ([5.0, 7.0], [1], [1]),
        ([7.0, 5.0], [0], [0]),
        ([5.0, 7.0, 7.0], [1, 2], [1, 2]),
        ([5.0, 0.0, 7.0], [2], [2]),
        ([5.0, 7.0, 5.0], [2], [0, 1, 2]),  # the members differ among themselves
        ([5.0, 7.0], [0, 1], [0, 1]),
    ],
)
def test_members_decide_about_workers_that_have_joined(digests: list[float], joined: list[int], odd: list[int]) -> None:
    assert odd_ranks(digests, joined) == odd


def differ(odd: list[int], joined: tuple[int, ...] = ()) -> Difference:
    return Difference(odd=odd, joined=joined, first="net.weight")


def test_the_error_names_rank_and_node_and_the_first_part_that_differs() -> None:
    check_parameters(differ([1]), 0, ("a", "b", "c"), 300)
    with pytest.raises(
        ParametersDiffer, match=r"at step 300 .* rank 1 on node b differ from those of the other 2"
    ) as e:
        check_parameters(differ([1]), 1, ("a", "b", "c"), 300)
    assert "and net.weight differs" in str(e.value) and "memory" in str(e.value) and "CAPABILITY" in str(e.value)
    with pytest.raises(ParametersDiffer, match="restarts from its newest checkpoint"):
        check_parameters(differ([0, 1]), 0, ("a", "b"), 300)


def test_the_error_of_joiners_blames_hooks_and_not_the_memory() -> None:
    with pytest.raises(ParametersDiffer, match="All workers that differ have joined before this step") as e:
        check_parameters(differ([1, 2], (1, 2)), 2, ("a", "b", "c"), 300)
    assert "memory" not in str(e.value)
    with pytest.raises(ParametersDiffer, match="memory"):
        check_parameters(differ([1, 2], (2,)), 2, ("a", "b", "c"), 300)


def test_the_first_part_that_differs() -> None:
    one = {"a": 1, "b": 2}
    assert first_unequal([one, {"a": 1, "b": 3}, {}]) == "b"
    assert first_unequal([one, {"a": 1, "c": 2}]) == "b"
    assert part_of({"lr": 0.1}) == part_of({"lr": 0.1}) != part_of({"lr": 0.2})


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
            check_parameters(differ(odd), rank, ("a", "b", "c"), 300, stops=True)
        assert caught.value.stops
        said.add(str(caught.value))
    assert len(said) == 1
    check_parameters(None, 0, ("a", "b", "c"), 300, stops=True)


class Rank:
    """Runs one step with a digest of its parameters."""

    def __init__(self, engine: Engine, flipped: bool) -> None:
        self.engine = engine
        self.module = nn.Linear(2, 1).double()
        with torch.no_grad():
            self.module.weight.fill_(1.0)
            self.module.bias.fill_(float(flipped) * 1e-300)
        self.found: list[tuple[list[int], str] | None] = []

    def __call__(self) -> Rank:
        self.engine.run(Agreement("start", lambda rank: b""))
        gradients = GradientBuckets(self.module.named_parameters(), 1, True)
        for made in (False, True):
            sums = CountSum()

            def run(micro_batch: int, sums: CountSum = sums) -> None:
                self.module(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
                sums.count()

            gradients.begin()
            digest = StateDigest(parts=parts_of(dict(self.module.named_parameters()))) if made else NO_DIGEST
            operation = GradientStep(range(4), gradients, sums, run, digest=digest)
            self.engine.run(operation)
            found = operation.difference
            self.found.append(None if found is None else (list(found.odd), found.first))
        gradients.close()
        self.engine.close()
        return self


def test_the_commit_tells_all_ranks_who_differs() -> None:
    coordinator = Coordinator()
    ranks = [(f"w{rank}", Rank(coordinator.worker(f"w{rank}"), rank == 2)) for rank in range(3)]
    coordinator.start()
    assert [rank.found for rank in run_threads(coordinator, ranks).values()] == [[None, ([2], "bias")]] * 3
