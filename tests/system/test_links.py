"""Links that are cut silently, recover in time, or break repeatedly; real processes, a real proxy."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from system.cluster import Cluster

from unicron_lightning.local_cluster.processes import until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(420)]

LIMITS = (
    *("detection.beat=0.1", "detection.least_silence=1", "detection.most_silence=4", "detection.reconnect_grace=5"),
    "coordinator.exit_when_idle=true",
)


def test_links(tmp_path: Path) -> None:
    options = {"coordinator": LIMITS, "separable": True}
    with Cluster(tmp_path, agents=2, nodes="1:2", settings={"full": 2}, **options) as cluster:
        pids = {line["node"]: line["pid"] for line in cluster.wait_world(2)}
        # A link that breaks and is renewed disturbs no worker, but is reported.
        for number in range(3):
            cluster.reset("n1")
            until("the new connection", lambda n=number: len(resumed(cluster)) > n, 60)
        (degraded,) = [error for error in cluster.events("error_reported") if error["node"] == "n1"]
        assert (degraded["kind"], degraded["severity"]) == ("link_degraded", "SEV3")
        # A cut shorter than the least silence is not detected.
        cluster.cut("n1")
        time.sleep(0.4)
        cluster.heal("n1")
        world = cluster.wait_world(2, after=time.time())
        assert {line["node"]: line["pid"] for line in world} == pids
        assert not {"worker_died", "agent_lost", "comm_error"} & {event["name"] for event in cluster.events()}
        # A lasting cut is detected by silence; training continues without the node, which returns after the cut.
        cluster.cut("n1")
        cluster.watch(lambda: cluster.events("agent_lost"), "the loss", 60)
        (lost,) = cluster.events("agent_lost")
        assert lost["node"] == "n1"
        assert 1 <= lost["silent"] < 5
        (alone,) = cluster.wait_world(1, after=time.time())
        assert (alone["node"], alone["pid"]) == ("n0", pids["n0"])
        cluster.heal("n1")
        back = {line["node"]: line["pid"] for line in cluster.wait_world(2, after=time.time())}
        assert back["n0"] == pids["n0"]
        assert back["n1"] != pids["n1"], "fenced by its own agent, and started anew"
        log = (tmp_path / "agent-n1.log").read_text()
        assert "coordinator_silent" in log, "the agent has noticed too"
        assert "its node was lost to the task" in log, "it is told why"


def resumed(cluster: Cluster) -> list[object]:
    return [event for event in cluster.events("agent_registered") if event["resumed"]]
