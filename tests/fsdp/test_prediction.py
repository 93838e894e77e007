"""Prediction with a sharded model: batches as under ddp, and a death while predicting."""

from __future__ import annotations

from pathlib import Path

import pytest
from system.cluster import Cluster
from system.test_prediction import check_samples, read

from unicron_lightning.strategies.fsdp.prediction import own_batch, plan_rows

SCRIPT = Path(__file__).with_name("predicting.py")


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("loader", "after"), [pytest.param(0, False, marks=pytest.mark.chaos), (1, True)])
def test_a_death_while_predicting(loader: int, after: bool, tmp_path: Path) -> None:
    (tmp_path / "loader").write_text(str(loader))
    for mark in ("fits", "after") if after else ("fits",):
        (tmp_path / mark).touch()
    with Cluster(tmp_path, agents=4, nodes="2:4", script=SCRIPT) as cluster:
        cluster.wait_end()
        assert len([death for death in cluster.events("worker_died") if death["cause"] == "signal"]) == 1
        assert not cluster.events("task_restarts")
    survivors = [result for result in read(tmp_path) if any(result["returned"])]
    assert len(survivors) == 3, "the partner of the dead worker keeps what it has predicted"
    check_samples(survivors)


def batches(parts: list[range], left: set[int], replica: int, replicas: int, shard: int) -> list[tuple[int, bool]]:
    rows = plan_rows(parts, left, 2, replica, replicas)
    return [(batch.number, batch.counts) for batch in (own_batch(loader, row, left, shard) for loader, row in rows)]


def test_the_batches_of_a_complete_world_are_those_of_ddp() -> None:
    parts = [range(7), range(7, 11)]
    left = set(range(11))
    assert [
        [number for number, counts in batches(parts, left, rank // 2, 2, rank % 2) if counts] for rank in range(4)
    ] == [
        [0, 4, 7],
        [1, 5, 8],
        [2, 6, 9],
        [3, 10],
    ]
    assert batches(parts, left, 1, 2, 1) == [(3, True), (6, False), (10, True)], "a row needs all shards"


def test_a_row_is_repeated_for_the_batch_that_is_missing() -> None:
    left = {1, 6}
    assert batches([range(7)], left, 0, 1, 0) == [(0, False), (6, True)]
    assert batches([range(7)], left, 0, 1, 1) == [(1, True), (6, False)]
