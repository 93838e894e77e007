"""A torchrun gets SIGTERM, as at a preemption: its workers leave after the step, and nothing is computed again."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from system.cluster import Cluster
from system.judge import Reference, check_exact

pytestmark = [pytest.mark.faults, pytest.mark.timeout(420)]


BESIDES = [pytest.param(way, marks=pytest.mark.chaos) for way in ("SIGINT", "SIGUSR1", "file")]


@pytest.mark.parametrize("way", ["SIGTERM", *BESIDES])
def test_a_torchrun_that_is_asked_to_end_leaves_after_the_step(way: str, tmp_path: Path, reference: Reference) -> None:
    notice = tmp_path / "notice"
    with Cluster(tmp_path, agents=2) as cluster:
        cluster.start_node("n2", "--rdzv-conf", f"node=n2,embedded=false,leave_signal=USR1,notice_file={notice}")
        before = cluster.wait_world(3)
        gone = next(line for line in before if (line["rank"] == 0 if way == "SIGTERM" else line["node"] == "n2"))
        agent = cluster.agents[gone["node"]]
        if way == "file":
            notice.touch()
        else:
            agent.send_signal(signal.Signals[way])
        without = cluster.wait_world(2, after=time.time())
        assert {line["pid"] for line in without} == {line["pid"] for line in before} - {gone["pid"]}
        assert agent.wait(30) == 0
        cluster.start_node(gone["node"])
        cluster.wait_world(3, after=time.time())
        names = [event["name"] for event in cluster.events()]
        assert names.count("agent_departs") == names.count("agent_left") == 1
        assert not {"worker_died", "agent_lost", "comm_error"} & set(names), "nothing failed"
        check_nothing_twice(cluster)
        cluster.finish()
        check_exact(tmp_path, reference, workers=3)


def check_nothing_twice(cluster: Cluster) -> None:
    finished = [(line["step"], *line["ids"]) for line in cluster.notes("computed")]
    assert finished and len(finished) == len(set(finished)), "nothing was computed again"


def test_the_others_hold_their_state_below_the_minimum(tmp_path: Path, reference: Reference) -> None:
    with Cluster(tmp_path, agents=2, nodes="2:2", settings={"full": 2}) as cluster:
        (gone, stays) = cluster.wait_world(2)
        agent = cluster.agents[gone["node"]]
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(30) == 0
        cluster.start_node(gone["node"])
        world = cluster.wait_world(2, after=time.time())
        assert stays["pid"] in {line["pid"] for line in world}
        check_nothing_twice(cluster)
        cluster.finish()
        check_exact(tmp_path, reference, workers=2)


def test_the_last_torchruns_save_before_they_end(tmp_path: Path) -> None:
    """As at the time limit of a whole allocation."""
    with Cluster(tmp_path) as cluster:
        cluster.wait_world(3)
        for agent in cluster.agents.values():
            agent.send_signal(signal.SIGTERM)
        statuses = [agent.wait(60) for agent in cluster.agents.values()]
        steps = max(line["step"] for line in cluster.notes("step"))
        check_nothing_twice(cluster)
        assert sorted(statuses) in ([0, 0, 143], [0, 143, 143], [143, 143, 143]), "the task has not ended"
        (saved,) = tmp_path.glob("**/last-pause-step=*.ckpt")
        assert saved.stem == f"last-pause-step={steps + 1}"


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
