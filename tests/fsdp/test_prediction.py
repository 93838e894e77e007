"""Prediction with a sharded model: batches as under ddp, and a death while predicting."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from system.cluster import Cluster
from system.test_prediction import check_samples, read

from unicron_lightning.data.passes import IndexedBatches, RowPart

SCRIPT = Path(__file__).with_name("predicting.py")


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("loader", "place", "streams", "slices"),
    [
        pytest.param(0, "before", [], 1, marks=pytest.mark.chaos),
        pytest.param(1, "after", [], 1, marks=pytest.mark.chaos),
        pytest.param(0, "after", [0, 1], 1, marks=pytest.mark.chaos),
        (1, "after", [1], 1),
        pytest.param(1, "before", [0, 1], 1, marks=pytest.mark.chaos),
        pytest.param(1, "reading", [0, 1], 1, marks=pytest.mark.chaos),
        *(pytest.param(1, place, [1], 2, marks=pytest.mark.chaos) for place in ("before", "after")),
        pytest.param(1, "reading", [0, 1], 2, marks=pytest.mark.chaos),
    ],
)
def test_a_death_while_predicting(loader: int, place: str, streams: list[int], slices: int, tmp_path: Path) -> None:
    """Before or after the victim's forward, or while it reads and its partner waits for its word, or in a lane."""
    (tmp_path / "loader").write_text(str(loader))
    if slices > 1:
        (tmp_path / "slices").touch()
    (tmp_path / "streams").write_text(" ".join(map(str, streams)))
    for mark in ("fits", place):
        (tmp_path / mark).touch()
    with Cluster(tmp_path, agents=4, nodes="2:4", script=SCRIPT) as cluster:
        cluster.wait_end()
        assert len([death for death in cluster.events("worker_died") if death["cause"] == "signal"]) == 1
        assert not cluster.events("task_restarts")
    survivors = [result for result in read(tmp_path) if any(result["returned"])]
    if slices == 1:
        assert len(survivors) == 3, "the partner of the dead worker keeps what it has predicted"
    else:
        assert 1 <= len(survivors) <= 2, "one worker of a lane keeps its predictions"
    check_samples(survivors, streams)


def batches(number: int, left: set[int], replica: int, replicas: int, shard: int) -> list[tuple[int, bool]]:
    expected: list[Any] = []
    order: Any = SimpleNamespace(num_micro_batches=lambda _: number, devices=1, place=lambda _, batch: (0, 0, batch))
    fetcher: Any = SimpleNamespace(end_epoch=lambda: None)
    rows = IndexedBatches(order, lambda ahead: expected.append(ahead) or fetcher)  # type: ignore[func-returns-value]
    rows.part = RowPart(size=2, shard=shard, together=True)
    rows.begin(0, math.inf)
    has_rows = rows.plan(frozenset(range(number)) - left, replica, replicas, set())
    planned = list(rows.rows())
    assert has_rows == bool(planned)
    requested = [batch for _, _, batch in expected[0]((0, 0, 0))]
    assert requested == [batch for batch, _ in planned], "the samples are requested ahead"
    return planned


def test_the_batches_of_a_complete_world_are_those_of_ddp() -> None:
    left = set(range(7))
    assert [[number for number, counts in batches(7, left, rank // 2, 2, rank % 2) if counts] for rank in range(4)] == [
        [0, 4],
        [1, 5],
        [2, 6],
        [3],
    ]
    assert batches(7, left, 1, 2, 1) == [(3, True), (6, False)], "a row needs all shards"


def test_a_row_is_repeated_for_the_batch_that_is_missing() -> None:
    left = {1, 6}
    assert batches(7, left, 0, 1, 0) == [(0, False), (6, True)]
    assert batches(7, left, 0, 1, 1) == [(1, True), (6, False)]
