"""A torchrun gets SIGTERM, as at a preemption: its workers leave after the step, and nothing is computed again."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from system.cluster import Cluster
from system.judge import Reference, check_exact

pytestmark = [pytest.mark.faults, pytest.mark.timeout(420)]


def test_a_torchrun_that_gets_sigterm_leaves_after_the_step(tmp_path: Path, reference: Reference) -> None:
    with Cluster(tmp_path) as cluster:
        before = cluster.wait_world(3)
        gone = next(line for line in before if line["rank"] == 0)
        agent = cluster.agents[gone["node"]]
        agent.send_signal(signal.SIGTERM)
        without = cluster.wait_world(2, after=time.time())
        assert {line["pid"] for line in without} == {line["pid"] for line in before} - {gone["pid"]}
        assert agent.wait(30) == 0
        cluster.start_node(gone["node"])
        cluster.wait_world(3, after=time.time())
        names = [event["name"] for event in cluster.events()]
        assert names.count("agent_departs") == names.count("agent_left") == 1
        assert not {"worker_died", "agent_lost", "comm_error"} & set(names), "nothing failed"
        finished = [(line["step"], *line["ids"]) for line in cluster.notes("computed")]
        assert finished and len(finished) == len(set(finished)), "nothing was computed again"
        cluster.finish()
        check_exact(tmp_path, reference, workers=3)


def test_a_torchrun_that_cannot_be_spared_is_stopped_at_once(tmp_path: Path, reference: Reference) -> None:
    with Cluster(tmp_path, agents=2, nodes="2:2", settings={"full": 2}) as cluster:
        (gone, _) = cluster.wait_world(2)
        agent = cluster.agents[gone["node"]]
        since = time.time()
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(30) == 128 + signal.SIGTERM
        assert time.time() - since < 10.0, "before leave_timeout"
        cluster.start_node(gone["node"])
        cluster.wait_world(2, after=time.time())
        cluster.finish()
        check_exact(tmp_path, reference, workers=2)


def test_a_second_sigterm_stops_the_workers(tmp_path: Path) -> None:
    """In the middle of a step, e.g. because the step is too long."""
    with Cluster(tmp_path, settings={"pace": 3.0}) as cluster:
        (gone, *_) = cluster.wait_world(3)
        agent = cluster.agents[gone["node"]]
        for _ in range(2):
            agent.send_signal(signal.SIGTERM)
            time.sleep(0.3)
        assert agent.wait(20) != 0
        assert "death signal" in (tmp_path / f"agent-{gone['node']}.log").read_text(), "torchelastic stopped its worker"
