"""Parameters that `fully_shard` does not divide, and a LightningModule that it divides itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fsdp.judge import notes
from fsdp.test_training import check, die, run

if TYPE_CHECKING:
    from worlds.client import Worlds

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

SCHEDULE = [
    die("forward", 0, 1),
    die("backward", 1, 0, nth=1),
    die("norm", 1, 1),
    die("reduction", 0, 0),
    die("commit", 0, 1),
    die("optimizer", 1, 1),
]


DEATHS: list[dict[str, Any]] = [
    {"replicas": 2, "tied": False, "own": True, "at": [[rank, point]]}
    for rank, point in ((0, "reduced"), (1, 42), (2, 44), (3, 45), (0, 46), (1, "commit"))
]
"""Around the sums over the lanes, which are after the reduction."""
SEVERAL: list[dict[str, Any]] = [
    {"replicas": 3, "tied": True, "own": True, "at": [[0, 43], [4, "gate"]]},
    {"replicas": 3, "tied": False, "own": True, "whole": "shampoo", "at": [[1, "updated"], [2, 45]]},
]


def test_deaths_around_the_sums_over_lanes(worlds: Worlds, tmp_path: Path) -> None:
    worlds.run("deaths:histories", 1, tmp_path, chosen=[*DEATHS, *SEVERAL], seeds=[])


@pytest.mark.chaos
def test_lanes_of_two_workers_equal_one_process(tmp_path: Path) -> None:
    settings = {"steps": 6, "full": 4, "own": "whole", "shards": 2, "slices": 2, "replicas": 1, "tied": False}
    run(tmp_path, settings, [], 4, "4:4")
    check(tmp_path, settings, 4)


@pytest.mark.chaos  # test_training has kills beside whole parameters, too
@pytest.mark.parametrize(
    ("own", "slices", "options"),
    [
        ("whole", 1, {"save_distributed_checkpoint": True}),
        ("whole", 2, {}),
        ("whole", 1, {"reproducible": True}),
        ("sharded", 1, {}),
        ("stand-in", 1, {}),
    ],
)
def test_kills_heal(tmp_path: Path, own: str, slices: int, options: dict[str, Any]) -> None:
    """Each lane has gradients of its own micro-batches; some micro-batches use a parameter, others do not.

    Also with groups like those of NCCL.
    """
    settings = {"steps": 12, "full": 4, "own": own, "shards": 2 // slices, "slices": slices, "save_every": 4}
    settings |= {"stand_in": own == "stand-in"}
    settings |= {"options": {"digest_every": 1, **options}, "memory": [3, 1], "tied": False}
    run(tmp_path, settings, SCHEDULE, 5, "2:4")
    assert [note["point"] for note in notes(tmp_path, "fault")] == [fault["point"] for fault in SCHEDULE]
    check(tmp_path, settings, 4)
