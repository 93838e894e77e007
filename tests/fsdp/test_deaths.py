"""Deaths at any points of a step: a replica that forms in the middle of it has the gradients of one process."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fsdp.deaths import POINTS
from lightning.pytorch.plugins.precision import Precision
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext, FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, FSDPStateContext

if TYPE_CHECKING:
    from worlds.client import Worlds

TWICE = [
    {"replicas": 2, "tied": False, "at": [[3, 19], [0, 17]]},
    {"replicas": 2, "tied": False, "at": [[1, 6], [2, 48]]},
    {"replicas": 2, "tied": True, "at": [[3, 26], [0, 47]]},
    {"replicas": 3, "tied": False, "at": [[1, 20], [4, 51]]},
    {"replicas": 3, "tied": True, "at": [[3, 45], [0, 30]]},
]
"""A survivor of an interrupted backward kept gradients of whole parameters, which its next backward added again."""

AT_THE_END = [
    {"replicas": 2, "tied": True, "at": [[1, 6]], "late": [0]},
    {"replicas": 3, "tied": False, "at": [[1, 20], [3, 30]], "late": [2]},
]
"""A spare takes its shard's state at the end, or dies then, as the worker that sends it does."""


MINOR = ".".join(torch.__version__.split(".")[:2])
OTHER = pytest.mark.skipif(MINOR not in ("2.11", "2.12", "2.13", "2.14"), reason="FSDP2 has other names from 2.15 on")


@pytest.mark.parametrize("own", [False, pytest.param(True, marks=OTHER)])
def test_no_micro_batch_counts_twice(worlds: Worlds, tmp_path: Path, own: bool) -> None:
    """With torch's reset of FSDP2, and with that for torch 2.11 and 2.12."""
    assert worlds.run("deaths:histories", 1, tmp_path, chosen=TWICE, seeds=[], own=own) == [[POINTS]]


def test_spares_end_with_the_state_of_their_shard(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run("deaths:histories", 1, tmp_path, chosen=AT_THE_END, seeds=[])


@pytest.mark.parametrize(
    ("replicas", "at", "after", "found"),
    [
        (2, [[3, "reduced"]], [(rank, "reduced") for rank in (0, 1, 2)], [[0, 0]] * 3),
        (2, [[3, "commit"]], [(rank, "commit") for rank in (0, 1, 2)], [[0, 0]] * 3),
        (3, [[5, "commit"]], [(rank, "commit") for rank in range(5)], [[0, 0]] * 5),
        # those of the first shard are complete, those of the second one lack the dead worker
        (3, [[5, "reduce"]], [(rank, "reduced") for rank in (0, 2, 4)], [[1, 1], [1, 0], [1, 1], [1, 0], [1, 0]]),
    ],
)
def test_sums_that_all_workers_of_a_shard_have_are_kept(
    worlds: Worlds, tmp_path: Path, replicas: int, at: list[Any], after: list[Any], found: list[list[int]]
) -> None:
    assert worlds.run("deaths:struck", 1, tmp_path, replicas=replicas, at=at, after=after) == [found]


def test_random_deaths(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run("deaths:histories", 1, tmp_path, chosen=[], seeds=list(range(2000, 2020)))


@pytest.mark.parametrize(("replicas", "flips", "odd"), [(3, [3], [3]), (3, [0, 5], [0, 5]), (2, [1], [0, 1, 2, 3])])
def test_a_flipped_bit_is_found_in_its_shard(
    worlds: Worlds, tmp_path: Path, replicas: int, flips: list[int], odd: list[int]
) -> None:
    [found] = worlds.run("deaths:flipped", 1, tmp_path, replicas=replicas, flips=flips)
    assert found == [odd] * (2 * replicas)


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(0, 240, 60))
def test_many_random_deaths(worlds: Worlds, tmp_path: Path, first: int) -> None:
    worlds.run("deaths:histories", 1, tmp_path, chosen=[], seeds=list(range(first, first + 60)))


GROUP = (
    *("fsdp_params", "_all_gather_result", "_all_reduce_state", "_partial_reduce_output", "_post_forward_indices"),
    *("_post_reduce_event", "_reshard_after_forward_event", "_training_state"),
    *("def _to_sharded(", "def _wait_all_gather_streams_on_event("),
)
SHARED = ("all_states", "iter_forward_root", "post_backward_final_callback_queued")
STATE = ("_comm_ctx", "_device_handle", "_is_root", "_modules_to_run_forward", "_state_ctx", "_training_state")
PARAMETER = ("_unsharded_param", "unsharded_accumulated_grad", "grad_offload_event", "sharded_param")
NAMES = {
    "2.11": ((*STATE, "_fsdp_param_group: "), ("all_gather_state", "reduce_scatter_state: ", "post_forward_order")),
    "2.12": ((*STATE, "_fsdp_param_groups"), ("all_gather_state", "reduce_scatter_states", "post_forward_order")),
}
"""Names that our own reset uses, by the minor versions of torch that lack one: of the state of a module, and of what
all of them share in communication.
"""


def lacking(owner: Any, names: Sequence[str]) -> list[str]:
    """Return the names that a class of FSDP2 does not have."""
    source = inspect.getsource(owner)
    return [name for name in names if name not in source]


def test_torch_has_the_names_that_a_reset_clears() -> None:
    assert hasattr(FSDPModule, "reset_iter_state") == (MINOR not in NAMES)
    assert [] == lacking(FSDPParam, PARAMETER) == lacking(FSDPParamGroup, ["fsdp_params"])
    state, context = NAMES.get(MINOR, (("_is_root", "_fsdp_param_groups"), ()))
    assert [] == lacking(FSDPState, state) == lacking(FSDPCommContext, context)
    if MINOR in NAMES:
        assert [] == lacking(FSDPParamGroup, GROUP) == lacking(FSDPStateContext, SHARED)


def test_lightning_has_the_name_after_which_a_spare_keeps_its_state() -> None:
    assert callable(Precision._after_closure)
