"""A worker is killed while it predicts: others predict its batches, and each sample belongs to one living worker."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from system.cluster import Cluster
from system.predicting import SAMPLES

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]
SCRIPT = Path(__file__).with_name("predicting.py")


@pytest.mark.parametrize(
    ("fits", "loader"),
    [pytest.param(True, 0, marks=pytest.mark.chaos), (True, 1), pytest.param(False, 1, marks=pytest.mark.chaos)],
)
def test_a_death_while_predicting(fits: bool, loader: int, tmp_path: Path) -> None:
    (tmp_path / "loader").write_text(str(loader))
    (tmp_path / ("fits" if fits else "waits")).touch()
    with Cluster(tmp_path, agents=3, nodes="3" if not fits else "1:3", script=SCRIPT) as cluster:
        cluster.wait_end()
        deaths = [death for death in cluster.events("worker_died") if death["cause"] == "signal"]
        assert len(deaths) == 1, "nobody else has failed"
    results = read(tmp_path)
    survivors = [result for result in results if any(result["returned"])]
    assert len(survivors) == 2
    if not fits:
        assert len(results) == 3, "the dead worker's successor has predicted nothing, and ended at once"
    check_samples(survivors)


def test_the_death_of_all_members_begins_the_prediction_again(tmp_path: Path) -> None:
    """A worker that returned meanwhile has no results: its end is not the task's."""
    (tmp_path / "loader").write_text("0")
    for mark in ("waits", "die"):
        (tmp_path / mark).touch()
    with Cluster(tmp_path, agents=3, nodes="3", script=SCRIPT) as cluster:
        cluster.wait_end()
        deaths = [death for death in cluster.events("worker_died") if death["cause"] == "signal"]
        assert len(deaths) == 3 and len(cluster.events("task_restarts")) == 1
        assert [event["succeeded"] for event in cluster.events("task_over")] == [True]
    results = read(tmp_path)
    assert len(results) == 4
    check_samples([result for result in results if any(result["returned"])])


def read(folder: Path) -> list[dict[str, Any]]:
    """What each worker got that came to the end of its script."""
    return [json.loads(path.read_text()) for path in folder.glob("predicted-*.json")]


def check_samples(survivors: list[dict[str, Any]], streams: Sequence[int] = ()) -> None:
    """Each sample belongs to one of the workers; streams have no indices."""
    for place, number in enumerate(SAMPLES):
        for source in ("returned", "epoch"):
            parts = [(r["returned"] if source == "returned" else r["epoch"][0])[place] for r in survivors]
            assert sorted(n for part in parts for batch in part for n in batch) == list(range(number)), source
        indices = [r["epoch"][1][place] for r in survivors]
        known = [] if place in streams else list(range(number))
        assert sorted(n for part in indices for batch in part for n in batch) == known
        batches = [batch for r in survivors for batch in r["batches"] if batch[0] == place]
        assert sorted(n for batch in batches for n in batch[1:]) == list(range(number))
