"""Digests and conditions of the reproducible mode."""

from __future__ import annotations

from itertools import pairwise, product

import torch

from unicron_lightning.worker.reproducible import (
    announced,
    conditions,
    digest_of,
    restore_kernels,
    state_tensors,
    use_deterministic_kernels,
    weighted,
)


def test_a_digest_is_that_of_the_parts() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool):
        whole = (torch.randn(7, 5) * 100).to(dtype)
        for rows, columns in (((3, 5), ()), ((3, 3, 5), (2,)), ((), (1, 4))):
            cuts = [[slice(a, b) for a, b in pairwise((0, *cut, size))] for cut, size in ((rows, 7), (columns, 5))]
            blocks = [(whole[along], along) for along in product(*cuts)]
            assert sum(weighted(each, at, whole.shape) for each, at in blocks) % (1 << 64) == weighted(whole)


def test_a_digest_shows_each_bit_and_place() -> None:
    state = {"a": torch.randn(4, 3), "b": [torch.randn(2), 1.0, "text"]}
    same = {"b": [state["b"][0].clone(), 1.0, "other"], "a": state["a"].clone()}
    assert digest_of(state) == digest_of(same)
    others = [
        {**state, "a": state["a"].view(3, 4)},
        {**state, "a": state["a"].flip(0)},
        {**state, "a": torch.nextafter(state["a"], torch.ones(4, 3))},
        {**state, "b": [state["b"][0], 2.0]},
        {"a": state["a"]},
    ]
    assert len({digest_of(each) for each in (state, *others)}) == 6
    assert [name for name, _ in state_tensors(state)] == [".a", ".b.0", ".b.1"]


def test_deterministic_kernels_are_undone() -> None:
    settings = use_deterministic_kernels()
    assert torch.are_deterministic_algorithms_enabled()
    restore_kernels(settings)
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_line_states_the_conditions() -> None:
    device = torch.device("cpu")
    found = conditions(device)
    assert found["threads"] == str(torch.get_num_threads()) and found["processor"] in announced(device)
    assert f"torch {torch.__version__}" in announced(device) and ", 2 shards;" in announced(device, 2)
