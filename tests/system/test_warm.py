"""A stand-by agent with warm workers replaces a failed one: its worker trains a second later."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from system.cluster import Cluster, Note
from system.judge import Reference, check_exact

from unicron_lightning.local_cluster.processes import kill, lives, until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(420)]

REJOIN_SECONDS = 5.0
"""Asserted limit on any machine; a quiet one needs 0.6 s. A worker started from scratch needs 4 to 7 s."""


PACE = {"pace": 0.05}
"""Most of the time the complete world only waits for starting workers: few steps leave them the CPU."""


def wait_warm(cluster: Cluster, number: int) -> None:
    """Wait until a number of warm workers have waited, over the whole run."""
    cluster.watch(lambda: len(cluster.events("warm_worker_hello")) >= number, f"{number} warm workers", 60)


def warm_agent(cluster: Cluster, world: list[Note]) -> str:
    """The node without a member."""
    return next(node for node in cluster.agents if node not in {line["node"] for line in world})


def rejoined(cluster: Cluster, before: list[Note], since: float) -> float:
    """Wait until a worker of the warm node has taken part in a step; return the time since ``since``, in parts."""
    spare = warm_agent(cluster, before)

    def steps() -> list[Note]:
        return [line for line in cluster.wait_world(2, after=since) if line["node"] == spare]

    (joiner,) = cluster.watch(steps, f"a step of {spare}", 60)
    assert joiner["pid"] not in {line["pid"] for line in before}
    events = [event for event in cluster.events() if event["at"] >= since]
    at = {name: next(e["at"] for e in events if e["name"] == name) - since for name in ("slot_granted", "worker_hello")}
    built = next(e["at"] for e in events if e["name"] == "worker_ready_to_join") - since
    seconds = min(line["at"] for line in cluster.notes("step", pid=joiner["pid"])) - since
    print(f"rejoin {seconds:.2f} s: slot {at['slot_granted']:.2f}, built {built:.2f}, first step {seconds:.2f}")
    assert at["worker_hello"] - at["slot_granted"] < 0.1, "it was there"
    return float(seconds)


@pytest.mark.allow_leak("unix_sockets", reason="a SIGKILLed agent cannot remove its socket")
def test_a_warm_stand_by_replaces_a_worker_and_an_agent(
    tmp_path: Path, reference_for: Callable[..., Reference]
) -> None:
    settings = {"nodes": 2, "full": 2}
    with Cluster(tmp_path, nodes="2:2", settings={**settings, **PACE}) as cluster:
        before = cluster.wait_world(2)
        wait_warm(cluster, 1)
        since = time.time()
        kill(before[0]["pid"])
        assert rejoined(cluster, before, since) < REJOIN_SECONDS

        wait_warm(cluster, 2)  # the agent whose worker died is a stand-by now
        before, since = cluster.wait_world(2, after=time.time()), time.time()
        dead = before[1]["node"]
        cluster.agents[dead].kill()
        assert rejoined(cluster, before, since) < REJOIN_SECONDS
        cluster.replace(dead)
        until("it stands by", lambda: len(cluster.events("standby_warms")) == 3)
        cluster.finish()
        check_exact(tmp_path, reference_for(**settings), workers=2)


@pytest.mark.allow_leak("unix_sockets", reason="a SIGKILLed agent cannot remove its socket")
@pytest.mark.chaos
def test_a_warm_worker_outlives_the_coordinator_but_not_its_agent(tmp_path: Path) -> None:
    with Cluster(tmp_path, nodes="2:2", settings={"nodes": 2, "full": 2, **PACE}) as cluster:
        before = cluster.wait_world(2)
        wait_warm(cluster, 1)
        kill(cluster.events("warm_worker_hello")[-1]["pid"])
        wait_warm(cluster, 2)  # torchrun has restarted it
        warm = cluster.events("warm_worker_hello")[-1]["pid"]
        assert not cluster.events("worker_died") and len(cluster.events("warm_worker_died")) == 1

        coordinator = cluster.coordinator()
        assert coordinator is not None
        kill(coordinator)
        until("another coordinator", lambda: cluster.coordinator() not in (None, coordinator))
        until("all are back", lambda: len(cluster.events("agent_registered")) >= 6)
        assert lives(warm)
        since = time.time()
        kill(before[1]["pid"])
        assert rejoined(cluster, before, since) < REJOIN_SECONDS
        assert warm in {line["pid"] for line in cluster.world()}, "the same process"

        agent = cluster.agents[before[1]["node"]]
        others = {before[1]["pid"], cluster.coordinator()}  # an agent that started the coordinator is its parent

        def started() -> list[psutil.Process]:
            return [child for child in psutil.Process(agent.pid).children() if child.pid not in others]

        workers = until("it starts its worker, to be warm", started)
        agent.kill()
        until("that ends with its agent", lambda: not any(lives(worker.pid) for worker in workers))
        number = len(cluster.events("agent_registered"))
        cluster.replace(before[1]["node"])
        # otherwise the end may come first
        until("the new agent", lambda: len(cluster.events("agent_registered")) > number)
        cluster.finish()
