"""Sharded models resume from the memory of the agents."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from fsdp.judge import SCRIPT, alone, between_replicas, differences, notes
from system.cluster import Cluster
from system.test_memory import held

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

TOLERANCE = 1e-10
EVERY = 3


def settings_of(replicas: int, **changed: Any) -> dict[str, Any]:
    return {"replicas": replicas, "full": 2 * replicas, "steps": 16, "pace": 0.15, "memory": [EVERY, 1], **changed}


def begin(folder: Path, settings: dict[str, Any], schedule: list[dict[str, Any]] | None = None) -> Cluster:
    workers = settings["full"]
    nodes = f"{workers}:{workers}"
    return Cluster(
        folder,
        script=SCRIPT,
        agents=workers,
        nodes=nodes,
        schedule=schedule,
        settings=settings,
        leaves="agent-*/*",
    )


def after_step(cluster: Cluster, step: int) -> dict[str, int]:
    """Wait for a step; return the process of each node's worker."""
    cluster.watch(lambda: any(line["step"] >= step for line in cluster.notes("step")), f"step {step}", 200)
    return {line["node"]: line["pid"] for line in cluster.world()}


def check(cluster: Cluster, settings: dict[str, Any], tier: str = "memory") -> dict[str, Any]:
    """Compare the parameters with those of one process; return the event of the restoration."""
    (restored,) = cluster.events("worker.state_restored")
    assert restored["tier"] == tier
    (restart,) = cluster.events("task_restarts")
    assert restart["memory" if tier == "memory" else "step"] == restored["step"]
    last = max(line["step"] for line in notes(cluster.folder, "step") if line["at"] < restored["at"])
    assert 0 <= last - restored["step"] <= EVERY
    [steps] = {note["step"] for note in notes(cluster.folder, "end")}
    reference = alone(cluster.folder / "alone", {**settings, "steps": steps})
    found = differences(cluster.folder, reference)
    assert len(found) == settings["full"] and max(found.values()) < TOLERANCE, found
    assert not between_replicas(cluster.folder)
    own = [note for note in notes(cluster.folder, "step") if note["at"] > restored["at"]]
    assert min(note["step"] for note in own) == restored["step"] + 1
    return restored


@pytest.mark.chaos  # it and two others are run with -m chaos, to keep `make test` short
def test_all_workers_of_two_replicas_die(tmp_path: Path) -> None:
    settings = settings_of(2)
    with begin(tmp_path, settings) as cluster:
        for pid in after_step(cluster, 8).values():
            os.kill(pid, signal.SIGKILL)
        cluster.wait_end(300, linger=True)
        restored = check(cluster, settings)
        assert len(restored["holders"]) == 4 and all(len(nodes) == 2 for nodes in restored["holders"])


@pytest.mark.parametrize(
    ("corrupt", "shards"),
    [
        pytest.param(False, 2, marks=pytest.mark.chaos),
        pytest.param(True, 2, marks=pytest.mark.chaos),
        (True, 1),  # a lane of two workers
    ],
)
def test_the_only_replica_loses_a_worker(tmp_path: Path, corrupt: bool, shards: int) -> None:
    settings = settings_of(1, shards=shards, slices=2 // shards)
    schedule = [{"point": "backward", "replica": 0, "shard": 1, "from_step": 8}]
    with begin(tmp_path, settings, schedule) as cluster:
        cluster.watch(lambda: cluster.notes("fault"), "the death", 200)
        if corrupt:  # the copies of both parts, on one node
            for path in held(cluster, "n1"):
                with path.open("r+b") as file:
                    file.write(b"not a state")
        cluster.wait_end(300, linger=True)
        check(cluster, settings)
        rejected = cluster.events("worker.memory_rejected")
        assert {event["worker"].partition("-")[0] for event in rejected} == ({"n1"} if corrupt else set())


@pytest.mark.chaos
def test_a_node_of_the_only_replica_dies(tmp_path: Path) -> None:
    """The other node's agent has a copy of its part."""
    settings = settings_of(1)
    with begin(tmp_path, settings) as cluster:
        after_step(cluster, 8)
        os.kill(cluster.agents["n1"].pid, signal.SIGKILL)
        cluster.replace("n1")
        cluster.wait_end(300, linger=True)
        restored = check(cluster, settings)
        assert restored["holders"] == [["n0"], ["n0"]]


@pytest.mark.chaos
def test_without_partners_a_nodes_death_leaves_the_disk(tmp_path: Path) -> None:
    settings = settings_of(1, memory=[EVERY, 0], save_every=EVERY)
    with begin(tmp_path, settings) as cluster:
        after_step(cluster, 8)
        os.kill(cluster.agents["n1"].pid, signal.SIGKILL)
        cluster.replace("n1")
        cluster.wait_end(300, linger=True)
        assert cluster.events("memory_offered")[-1]["steps"] == []
        check(cluster, settings, "disk")
