"""A worker is killed, and the coordinator's account agrees with the workers' own notes."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from system.cluster import Cluster
from system.train import FLOPS_PER_STEP

from unicron_lightning.local_cluster.processes import kill

pytestmark = [pytest.mark.faults, pytest.mark.timeout(420)]
SLACK = 2.0
"""Seconds by which clock readings at both ends of a message may differ on a busy machine."""


def measured(cluster: Cluster, slots: int) -> float:
    """Step time of a world of this size, once known."""

    def known() -> float | None:
        return cluster.status()["tasks"]["task"]["step_seconds"].get(str(slots))

    return float(cluster.watch(known, f"the step time of {slots} slots", 60))


def test_the_phases_of_an_incident_are_those_that_the_workers_saw(tmp_path: Path) -> None:
    shape = {"nodes": 2, "full": 2, "pace": 0.05, "slow": 0.05}
    with Cluster(tmp_path, agents=2, nodes="1:2", settings=shape) as cluster:
        cluster.wait_world(2)
        both = measured(cluster, 2)
        assert 0.1 <= both < 0.1 + SLACK, "two micro-batches of 50 ms each"
        (killed,) = (line for line in cluster.world() if line["rank"] == 1)
        before = max(line["epoch"] for line in cluster.world())
        killed_at = time.time()
        kill(killed["pid"])
        (alone,) = cluster.wait_world(1, after=killed_at)
        cluster.wait_world(2, after=alone["at"])
        bill = cluster.watch(
            lambda: next((b for b in cluster.fetch("/v1/incidents")["incidents"] if b["outcome"]), None), "its end", 60
        )
        steps = [line for line in cluster.notes("step") if line["epoch"] > before]
        recovered = min(line["at"] for line in steps)
        grown = min(line["at"] for line in steps if line["world"] == 2)
        assert (bill["incident"], bill["cause"], bill["outcome"], bill["failures"]) == (
            "i1",
            "signal 9 (SIGKILL): killed from outside",
            "restored",
            1,
        )
        assert killed_at - SLACK < bill["fault_at"] <= bill["known_at"] <= bill["stepped_at"] <= bill["closed_at"]
        assert bill["stepped_at"] == pytest.approx(recovered, abs=SLACK)
        assert bill["closed_at"] == pytest.approx(grown, abs=SLACK)
        seconds = {phase: cost["seconds"] for phase, cost in bill["phases"].items()}
        assert sum(seconds.values()) == pytest.approx(bill["closed_at"] - bill["fault_at"], abs=0.001)
        assert seconds["detection"] < SLACK and seconds["transition"] < 2 * SLACK and seconds["sub_healthy"] > 0
        stood = bill["phases"]["transition"]
        assert stood["worker_seconds"] == pytest.approx(2 * stood["seconds"], rel=0.01)
        assert stood["waf_seconds"] == pytest.approx(FLOPS_PER_STEP / both * stood["seconds"], rel=0.5)
        missing = bill["phases"]["sub_healthy"]
        assert 0 < missing["waf_seconds"] < FLOPS_PER_STEP / both * missing["seconds"]
        (tmp_path / "incidents.json").write_text(json.dumps(cluster.fetch("/v1/incidents"), indent=2))
        cluster.finish()
