"""The coordinator reaches no agent for a while: nobody is lost, and the training goes on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from system.cluster import Cluster
from system.judge import Reference, check_exact

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]


@pytest.mark.parametrize("seconds", [6.5, pytest.param(20.0, marks=pytest.mark.chaos)])
@pytest.mark.parametrize("agents", [3, pytest.param(1, marks=pytest.mark.chaos)])
def test_an_isolated_coordinator_declares_nobody_lost(
    agents: int, seconds: float, tmp_path: Path, reference: Reference
) -> None:
    """Longer than any silence, and than a ping of a WebSocket. A worker that dies meanwhile is replaced after it."""
    settings = {"pace": 0.05, "full": agents}
    with Cluster(tmp_path, agents=agents, coordinator=(), separable=True, settings=settings) as cluster:
        epochs = {line["epoch"] for line in cluster.wait_world(agents)}
        for node in cluster.agents:
            cluster.cut(node)
        time.sleep(seconds)
        assert {line["epoch"] for line in cluster.wait_world(agents, after=time.time())} == epochs
        killed = cluster.kill_worker("n0") if agents > 1 else 0.0
        for node in cluster.agents:
            cluster.heal(node)
        cluster.wait_world(agents, after=max(killed, time.time()))
        time.sleep(6.0)
        deaths = cluster.events("worker_died")
        assert len(deaths) == (1 if killed else 0), deaths
        assert not cluster.events("agent_lost") and not cluster.notes("step", life=2)
        cluster.finish()
        check_exact(tmp_path, reference, workers=agents)


@pytest.mark.parametrize("seconds", [12.0, pytest.param(25.0, marks=pytest.mark.chaos)])
def test_a_coordinator_that_starts_isolated_declares_nobody_lost(
    seconds: float, tmp_path: Path, reference: Reference
) -> None:
    """Its agents come back later than `restart_grace`; a worker has died meanwhile."""
    with Cluster(tmp_path, coordinator=(), separable=True, settings={"pace": 0.05}) as cluster:
        epochs = {line["epoch"] for line in cluster.wait_world(3)}
        for node in cluster.agents:
            cluster.cut(node)
        cluster.kill_coordinator()
        cluster.start_coordinator()
        time.sleep(seconds)
        assert {line["epoch"] for line in cluster.wait_world(3, after=time.time())} == epochs
        assert not cluster.events("agent_lost")
        killed = cluster.kill_worker("n0")
        for node in cluster.agents:
            cluster.heal(node)
        cluster.wait_world(3, after=killed)
        time.sleep(6.0)
        assert len(cluster.events("worker_died")) == 1, "none of the others is lost"
        assert not cluster.events("agent_lost") and not cluster.notes("step", life=2)
        cluster.finish()
        check_exact(tmp_path, reference, workers=3)
