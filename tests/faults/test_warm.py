"""An agent that stands by with warm workers takes the place of one that fails: its worker trains a second later."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from faults.cluster import Cluster, Note, kill, lives, until
from faults.judge import Reference, check_exact

pytestmark = [pytest.mark.faults, pytest.mark.timeout(200)]

REJOIN_SECONDS = 5.0
"""What is asserted, on any machine; on a quiet one it is 0.6 s. A worker started from nothing needs 4 to 7 s."""


def wait_warm(cluster: Cluster, number: int) -> None:
    """Wait until so many warm workers have waited, over all the run."""
    cluster.watch(lambda: len(cluster.events("warm_worker_hello")) >= number, f"{number} warm workers", 60)


def warm_agent(cluster: Cluster, world: list[Note]) -> str:
    """The node that has no member."""
    return next(node for node in cluster.agents if node not in {line["node"] for line in world})


def rejoined(cluster: Cluster, before: list[Note], since: float) -> float:
    """Wait until a worker of the warm node has taken part in a step; tell how long after ``since`` it had, in parts."""
    spare = warm_agent(cluster, before)
    after = cluster.wait_world(2, after=since)
    joiner = next(line for line in after if line["node"] == spare)
    assert joiner["pid"] not in {line["pid"] for line in before}
    events = [event for event in cluster.events() if event["at"] >= since]
    at = {name: next(e["at"] for e in events if e["name"] == name) - since for name in ("slot_granted", "worker_hello")}
    built = next(e["at"] for e in events if e["name"] == "worker_ready_to_join") - since
    seconds = min(line["at"] for line in cluster.notes("step", pid=joiner["pid"])) - since
    print(f"rejoin {seconds:.2f} s: slot {at['slot_granted']:.2f}, built {built:.2f}, first step {seconds:.2f}")
    assert at["worker_hello"] - at["slot_granted"] < 0.1, "it was there"
    return float(seconds)


@pytest.mark.allow_leak("unix_sockets", reason="a SIGKILLed agent cannot remove its socket")
def test_a_warm_stand_by_replaces_an_agent_and_a_worker(tmp_path: Path, reference_for: object) -> None:
    settings = {"nodes": 2, "full": 2}
    reference: Reference = reference_for(**settings)  # type: ignore[operator]
    with Cluster(tmp_path, nodes="2:2", settings=settings) as cluster:
        before = cluster.wait_world(2)
        wait_warm(cluster, 1)
        dead, since = before[1]["node"], time.time()
        cluster.agents[dead].kill()
        assert rejoined(cluster, before, since) < REJOIN_SECONDS
        cluster.replace(dead)
        wait_warm(cluster, 2)

        before, since = cluster.wait_world(2, after=time.time()), time.time()
        kill(before[0]["pid"])
        assert rejoined(cluster, before, since) < REJOIN_SECONDS
        assert cluster.agents[before[0]["node"]].poll() is None
        wait_warm(cluster, 3)  # the agent whose worker died
        cluster.finish(120)
        check_exact(tmp_path, reference, workers=2)


@pytest.mark.allow_leak("unix_sockets", reason="a SIGKILLed agent cannot remove its socket")
def test_a_warm_worker_outlives_the_coordinator_but_not_its_agent(tmp_path: Path) -> None:
    with Cluster(tmp_path, nodes="2:2", settings={"nodes": 2, "full": 2}) as cluster:
        before = cluster.wait_world(2)
        wait_warm(cluster, 1)
        spare = warm_agent(cluster, before)
        (warm,) = [event["pid"] for event in cluster.events("warm_worker_hello")]
        kill(warm)
        wait_warm(cluster, 2)  # torchrun has started it anew
        warm = cluster.events("warm_worker_hello")[-1]["pid"]
        assert not cluster.events("worker_died") and len(cluster.events("warm_worker_died")) == 1

        coordinator = cluster.coordinator()
        assert coordinator is not None
        kill(coordinator)
        until("another coordinator", lambda: cluster.coordinator() not in (None, coordinator), 30)
        until("all are back", lambda: len(cluster.events("agent_registered")) >= 6, 30)
        assert lives(warm)

        since = time.time()
        kill(before[1]["pid"])
        assert rejoined(cluster, before, since) < REJOIN_SECONDS
        assert warm in {line["pid"] for line in cluster.world()}, "the same process"

        wait_warm(cluster, 3)
        idle = cluster.events("warm_worker_hello")[-1]["pid"]
        assert spare != before[1]["node"]
        os.kill(cluster.agents[before[1]["node"]].pid, signal.SIGKILL)
        until("it ends with its agent", lambda: not lives(idle), 10)
        cluster.replace(before[1]["node"])
        wait_warm(cluster, 4)
        cluster.finish(120)
