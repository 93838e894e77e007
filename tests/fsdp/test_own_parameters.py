"""Parameters that `fully_shard` does not divide, and a LightningModule that it divides itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fsdp.judge import notes
from fsdp.test_training import check, die, run

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

SCHEDULE = [
    die("forward", 0, 1),
    die("backward", 1, 0, nth=1),
    die("norm", 1, 1),
    die("reduction", 0, 0),
    die("commit", 0, 1),
    die("optimizer", 1, 1),
]


@pytest.mark.parametrize(
    ("own", "slices", "options"),
    [
        ("whole", 1, {"save_distributed_checkpoint": True}),
        pytest.param("whole", 2, {}, marks=pytest.mark.chaos),
        pytest.param("whole", 1, {"reproducible": True}, marks=pytest.mark.chaos),
        pytest.param("sharded", 1, {}, marks=pytest.mark.chaos),
    ],
)
def test_kills_heal(tmp_path: Path, own: str, slices: int, options: dict[str, Any]) -> None:
    """Each lane has gradients of its own micro-batches; some micro-batches use a parameter, others do not."""
    settings = {"steps": 12, "full": 4, "own": own, "shards": 2 // slices, "slices": slices, "save_every": 4}
    settings |= {"options": {"digest_every": 1, **options}, "memory": [3, 1], "tied": False}
    run(tmp_path, settings, SCHEDULE, 5, "2:4")
    assert [note["point"] for note in notes(tmp_path, "fault")] == [fault["point"] for fault in SCHEDULE]
    check(tmp_path, settings, 4)
