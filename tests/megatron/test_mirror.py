"""A killed rank's optimizer shard is restored exactly from its mirror, wherever in the step the rank died."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from unicron_lightning.errors import ConfigError
from unicron_lightning.replica.mirror import Redundancy

if TYPE_CHECKING:
    from pathlib import Path

    from worlds.client import Worlds

pytestmark = pytest.mark.faults

BUCKETS = {"overlap_grad_reduce": True, "bucket_size": 4000}


def run(worlds: Worlds, folder: Path, world: int, dying: list[int], **arguments: Any) -> dict[str, Any]:
    """The survivors' results, which must all be equal."""
    results = worlds.run("zero1:killed", world, folder, killed=tuple(dying), dying=dying, **arguments)
    survivors = [result for result in results if result is not None]
    common = [
        {key: result.get(key) for key in ("versions", "lost", "exact", "gradients", "norms")} for result in survivors
    ]
    assert all(result == common[0] for result in common)
    return survivors[0]


@pytest.mark.parametrize(
    ("world", "dying", "options"),
    [
        (2, [0], {"when": "backward"}),
        (3, [1], {"when": "backward", "bf16": True}),
        (3, [1, 2], {"when": "backward", "redundancy": {"copies": 2}}),
        (2, [1], {"when": "reduce-scatter", **BUCKETS}),
        (2, [1], {"when": "optimizer"}),
        (3, [1], {"when": "optimizer"}),
        (3, [1], {"when": "before the copies"}),
        (4, [2, 3], {"when": "optimizer", "ep": 2}),  # a replica of two lanes
        # not in a reduction: in plain groups of gloo a survivor may wait for another one that has left it
        (4, [0, 1], {"when": "backward", "ep": 2, "bf16": True}),
        (6, [0, 1, 4, 5], {"when": "backward", "ep": 2, "redundancy": {"copies": 2}}),
    ],
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_a_death(worlds: Worlds, tmp_path: Path, world: int, dying: list[int], options: dict[str, Any]) -> None:
    """Nothing is half stepped, and before the copies arrive a death costs one step."""
    result = run(worlds, tmp_path, world, dying, **options)
    assert result["versions"] == [2] if options["when"] == "before the copies" else result["versions"][0] == 2
    assert result["exact"] and result["gradients"]


def test_a_rank_that_dies_with_its_mirror_is_lost(worlds: Worlds, tmp_path: Path) -> None:
    result = run(worlds, tmp_path, 3, [1, 2], when="backward")
    assert result["versions"] == []
    assert re.fullmatch(
        r"version 2 of the optimizer's state cannot be restored: \d+ of 58432 elements of version 2 are lost, of .+",
        result["lost"],
    )


def test_joiners_without_state_get_their_shards(worlds: Worlds, tmp_path: Path) -> None:
    results = worlds.run("zero1:grown", 3, tmp_path, founders=2)
    assert all(result == results[0] for result in results)
    assert results[0]["versions"] == [2, 1]
    assert results[0]["exact"]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_graph_of_an_interrupted_step_leaves_no_hooks(worlds: Worlds, tmp_path: Path, overlap: bool) -> None:
    assert worlds.run("zero1:laid_out", 1, tmp_path, overlap_grad_reduce=overlap) == [True]


def test_stages_agree_on_a_version_that_both_have(worlds: Worlds, tmp_path: Path) -> None:
    results = worlds.run("zero1:staged", 4, tmp_path)
    for result in (results[0], results[2]):
        assert result == {"surveys": [[3, 2], [2, 1]], "version": 2, "exact": True}


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="copies=-1: expected"):
        Redundancy(copies=-1)
