"""A sharded model on a GPU: workers of replicas die, and the run ends as one in a single process on the same GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsdp.judge import SCRIPT, alone, between_replicas, differences, notes
from gpu import kit
from system.cluster import Cluster

pytestmark = [pytest.mark.timeout(kit.limit())]

WORKERS = 4
DEATHS = [
    {"point": "all-gather", "replica": 0, "shard": 1, "nth": 3},
    {"point": "reduce-scatter", "replica": 1, "shard": 0, "nth": 5},
    {"point": "validation", "replica": 1, "shard": 1},
]
LATER = [
    {"point": "reduction", "replica": 0, "shard": 0, "nth": 1},
    {"point": "commit", "replica": 0, "shard": 1},
]


@pytest.mark.gpu("K13", worth=9, seconds=130)
@pytest.mark.parametrize(
    ("deaths", "different"),
    [
        pytest.param(DEATHS, {}, id="in_calls"),
        pytest.param(LATER, {}, id="in_the_commit"),
        pytest.param(
            DEATHS, {"configures": False, "options": {"cpu_offload": True}}, id="offloaded", marks=pytest.mark.hardware
        ),
    ],
)
def test_deaths_in_replicas(
    deaths: list[dict[str, Any]],
    different: dict[str, Any],
    tmp_path: Path,
    record_property: Callable[[str, Any], None],
) -> None:
    accelerator = "gpu" if kit.device() == "cuda" else "cpu"
    settings = {"steps": 12, "full": WORKERS, "validate": 5, "accelerator": accelerator, **different}
    with Cluster(
        tmp_path,
        script=SCRIPT,
        agents=WORKERS + 1,
        nodes=f"2:{WORKERS}",
        schedule=deaths,
        settings=settings,
        variables=lambda node: kit.environment(node),
    ) as cluster:
        cluster.wait_end(kit.limit() - 10)
        assert "task_restarts" not in [event["name"] for event in cluster.events()]
    assert [note["point"] for note in notes(tmp_path, "fault")] == [death["point"] for death in deaths]
    [steps] = {note["step"] for note in notes(tmp_path, "end")}
    reference = alone(tmp_path / "alone", {**settings, "options": {}, "steps": steps})
    found = differences(tmp_path, reference)
    record_property("difference", max(found.values()))
    assert len(found) == WORKERS and max(found.values()) < 1e-10, found
    assert not between_replicas(tmp_path)
