"""Muon, whose updates need whole matrices, with deaths before, in and after its updates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from fsdp.judge import notes
from fsdp.test_training import check, die, run

if TYPE_CHECKING:
    from pathlib import Path

    from worlds.client import Worlds

MUON_POINTS = 64
"""Points of a step with an update of whole matrices, the last ones of which are those of the update and the commit."""
CHOSEN: list[dict[str, Any]] = [
    {"replicas": 2, "tied": False, "muon": True, "at": [[rank, point]]}
    for rank, point in ((0, "update"), (1, "update"), (2, 58), (3, 59), (0, 60), (1, 61), (2, "updated"), (3, "commit"))
]
TOGETHER: list[dict[str, Any]] = [
    {"replicas": 2, "tied": True, "muon": True, "at": [[0, 59], [3, 61]]},
    {"replicas": 3, "tied": False, "muon": True, "at": [[1, "updated"], [2, 58]]},
    {"replicas": 2, "tied": False, "muon": True, "at": [[1, 60], [2, "commit"]]},
]


def test_deaths_in_an_update(worlds: Worlds, tmp_path: Path) -> None:
    """Each worker in some part of it, and two at once; parameters are those of one process."""
    worlds.run("deaths:histories", 1, tmp_path, chosen=[*CHOSEN, *TOGETHER], seeds=[])


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_kills_heal(tmp_path: Path) -> None:
    schedule = [die("update", 0, 1), die("optimizer", 1, 0), die("updated", 1, 1), die("commit", 0, 0)]
    settings = {"steps": 12, "full": 4, "muon": True, "tied": False, "save_every": 5}
    run(tmp_path, settings, schedule, 5, "2:4")
    assert [note["point"] for note in notes(tmp_path, "fault")] == [fault["point"] for fault in schedule]
    check(tmp_path, settings, 4)
