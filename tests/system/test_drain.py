"""Nodes of a training task are drained: workers leave and return, and nothing is recomputed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from system.cluster import Cluster
from system.judge import Reference, check_exact

from unicron_lightning.local_cluster.processes import kill, lives

pytestmark = [pytest.mark.faults, pytest.mark.timeout(420)]


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.chaos)])
def test_a_node_is_drained_and_used_again(rank: int, tmp_path: Path, reference: Reference) -> None:
    with Cluster(tmp_path) as cluster:
        before = cluster.wait_world(3)
        gone = next(line for line in before if line["rank"] == rank)
        cluster.order("drain", gone["node"])
        without = cluster.wait_world(2, after=time.time())
        assert {line["pid"] for line in without} == {line["pid"] for line in before} - {gone["pid"]}
        cluster.watch(lambda: not lives(gone["pid"]), "the end of the drained worker", 60)
        assert cluster.agents[gone["node"]].poll() is None, "its agent stands by"
        cluster.order("undrain", gone["node"])
        again = cluster.wait_world(3, after=time.time())
        assert gone["node"] in {line["node"] for line in again}
        names = [event["name"] for event in cluster.events()]
        assert names.count("slot_revoked") == 1
        assert not {"worker_died", "agent_lost", "comm_error"} & set(names), "nothing failed"
        finished = [(line["step"], *line["ids"]) for line in cluster.notes("computed")]
        assert finished and len(finished) == len(set(finished)), "nothing was computed again"
        cluster.finish()
        check_exact(tmp_path, reference, workers=3)


def test_a_task_is_resized_while_it_trains(tmp_path: Path, reference: Reference) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.wait_world(3)
        cluster.order("resize", "task", "1")
        (left,) = cluster.wait_world(1, after=time.time())
        cluster.order("resize", "task", "all")
        assert left["pid"] in {line["pid"] for line in cluster.wait_world(3, after=time.time())}
        assert not {"worker_died", "agent_lost", "comm_error"} & {event["name"] for event in cluster.events()}
        cluster.finish()
        check_exact(tmp_path, reference, workers=3)


def test_a_worker_dies_while_another_leaves(tmp_path: Path, reference: Reference) -> None:
    with Cluster(tmp_path) as cluster:
        for delay in (0.0, 0.03):
            world = {line["rank"]: line for line in cluster.wait_world(3, after=time.time())}
            cluster.order("drain", world[0]["node"])
            time.sleep(delay)
            kill(world[1]["pid"])
            cluster.watch(lambda pid=world[0]["pid"]: not lives(pid), "the end of the drained worker", 60)
            cluster.wait_world(2, after=time.time())
            cluster.order("undrain", world[0]["node"])
        cluster.wait_world(3, after=time.time())
        cluster.finish()
        check_exact(tmp_path, reference, workers=3)
