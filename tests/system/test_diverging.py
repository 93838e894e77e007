"""Ranks on different paths: the task ends at once and names both calls; a stop of one rank is a stop of all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from system.cluster import Cluster

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]
SCRIPT = Path(__file__).with_name("diverging.py")


def run(folder: Path, nodes: str = "2:2", **case: Any) -> tuple[set[int], Cluster]:
    (folder / "case.json").write_text(json.dumps({"strategy": "unicron", "place": "batch", "ranks": [0], **case}))
    with Cluster(folder, agents=2, nodes=nodes, script=SCRIPT) as cluster:
        return set(cluster.wait_exit(200).values()), cluster


@pytest.mark.parametrize(
    ("call", "name", "strategy"),
    [
        ("barrier", "barrier", "unicron_fsdp"),
        ("save", "save_checkpoint", "unicron_megatron"),
        pytest.param("save", "save_checkpoint", "unicron", marks=pytest.mark.chaos),
        pytest.param("barrier", "barrier", "unicron", marks=pytest.mark.chaos),
        pytest.param("barrier", "barrier", "unicron_megatron", marks=pytest.mark.chaos),
        pytest.param("save", "save_checkpoint", "unicron_fsdp", marks=pytest.mark.chaos),
    ],
)
def test_one_rank_alone_in_a_collective_ends_the_task(tmp_path: Path, call: str, name: str, strategy: str) -> None:
    statuses, cluster = run(tmp_path, call=call, strategy=strategy)
    assert statuses == {1}
    [stopped] = cluster.events("task_stopped")
    assert f"rank 0 in '{name}'" in stopped["reason"] and "rank 1 in 'step'" in stopped["reason"]


def test_one_rank_alone_tests_after_the_others_have_finished(tmp_path: Path) -> None:
    """As scripts with ``if trainer.is_global_zero: trainer.test(...)`` do."""
    statuses, _cluster = run(tmp_path, call="test", place="after")
    assert statuses == {0} and len(list(tmp_path.glob("ended-*.json"))) == 2


def test_an_error_of_one_rank_in_each_validation_ends_the_task_at_the_second(tmp_path: Path) -> None:
    statuses, cluster = run(tmp_path, nodes="1:2", call="fail", place="", last=20_000)
    assert statuses == {1}
    [stopped] = cluster.events("task_stopped")
    assert "RuntimeError: no batch to concatenate (raised again" in stopped["reason"]
    assert len(cluster.events("error_reported")) == 2


def test_an_error_of_one_rank_after_the_training_fails_the_task(tmp_path: Path) -> None:
    statuses, cluster = run(tmp_path, call="export", place="after")
    assert 1 in statuses
    [over] = cluster.events("task_over")
    assert not over["succeeded"] and "OSError: no space for the exported model" in over["reason"]


@pytest.mark.parametrize(
    ("strategy", "place"),
    [
        *(("unicron", "validation"), ("unicron_fsdp", "batch"), ("unicron_megatron", "batch")),
        *(pytest.param("unicron", place, marks=pytest.mark.chaos) for place in ("batch", "epoch")),
        *(pytest.param("unicron_fsdp", place, marks=pytest.mark.chaos) for place in ("validation", "epoch")),
    ],
)
def test_a_stop_of_one_rank_stops_all(tmp_path: Path, place: str, strategy: str) -> None:
    statuses, cluster = run(tmp_path, call="stop", place=place, strategy=strategy)
    assert statuses == {0}
    steps = {json.loads(path.read_text())["step"] for path in tmp_path.glob("ended-*.json")}
    assert len(steps) == 1 and steps < {*range(30)}, steps
    assert not cluster.events("task_stopped")
