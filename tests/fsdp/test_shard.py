"""A shard of an FSDP2 model in worlds of replicas: sums, norms, updates, a partner's death, and its replacement."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from unicron_lightning import UnicronFSDPStrategy
from unicron_lightning.errors import ConfigError

if TYPE_CHECKING:
    from worlds.client import Worlds

TOLERANCE = 1e-6


@pytest.mark.parametrize(
    ("world", "shards", "offloads"),
    [*((w, s, False) for w, s in [(1, 1), (2, 2), (2, 1), (4, 2), (3, 3), (6, 2)]), (2, 2, True)],
)
def test_steps_equal_those_of_one_process(
    worlds: Worlds, tmp_path: Path, world: int, shards: int, offloads: bool
) -> None:
    results = worlds.run("sharded:two_steps", world, tmp_path, shards=shards, offloads=offloads)
    assert all(found < TOLERANCE for found, _ in results)
    for rank in range(shards, world):
        assert results[rank][1] == results[rank % shards][1], "replicas differ"


def test_a_partner_dies_in_a_backward_and_is_replaced(worlds: Worlds, tmp_path: Path) -> None:
    exits = worlds.exits("sharded:partner_dies", 5, tmp_path)
    logs = "\n".join((tmp_path / f"{rank}.log").read_text() for rank in range(5))
    assert exits == [0, 0, 0, 9, 0], logs
    results = {rank: worlds.result(tmp_path, rank) for rank in (0, 1, 2, 4)}
    assert all(found < TOLERANCE for found, _, _ in results.values())
    assert [results[rank][1] is not None for rank in (0, 1, 2, 4)] == [False, False, True, False]
    assert results[0][2] == results[2][2] and results[1][2] == results[4][2], "replicas differ"


def test_a_reduction_is_repeated_from_the_kept_sums(worlds: Worlds, tmp_path: Path) -> None:
    first, second = worlds.run("sharded:recovered_sums", 2, tmp_path)
    assert first[0] == first[1] == second[0] == second[1]


def test_the_optimizer_of_another_fit_is_not_loaded(worlds: Worlds, tmp_path: Path) -> None:
    [(same, next_one)] = worlds.run("sharded:another_fit", 1, tmp_path)
    assert same[0] < TOLERANCE and same[1:] == [6, 1e-2]
    assert next_one[0] < TOLERANCE and next_one[1:] == [0, 1.0]


@pytest.mark.parametrize("reshards", [True, False])
def test_a_replica_without_a_row_after_a_validation_gathers_its_parameters_again(
    worlds: Worlds, tmp_path: Path, reshards: bool
) -> None:
    results = worlds.run("sharded:idle_after_validation", 4, tmp_path, reshards=reshards)
    assert all(found < TOLERANCE for found in results)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"shard_size": 0}, "shard_size=0: expected 1 or more"),
        ({"reshard_after_forward": 2}, "reshard_after_forward=2: expected True or False"),
        ({"save_distributed_checkpoint": "yes"}, "save_distributed_checkpoint='yes': expected True or False"),
        ({"blocks": "Block"}, "expected names of classes, such as"),
        ({"blocks": 0}, "blocks=0: expected names of classes, or a number of parameters of 1 or more"),
        ({"cpu_offload": 1}, "cpu_offload=1: expected True or False"),
    ],
)
def test_what_the_strategy_does_not_support_is_refused_by_name(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        UnicronFSDPStrategy(**options)


def test_mixed_precision_and_whole_tensors_are_those_of_plain_fsdp(worlds: Worlds, tmp_path: Path) -> None:
    for own, plain, loaded in worlds.run("sharded:beside_plain_fsdp", 2, tmp_path):
        assert own == plain == loaded
