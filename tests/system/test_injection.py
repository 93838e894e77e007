"""Faults by order and by callback on real processes: each is logged before it strikes, and each is recovered from."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
from system.cluster import Cluster
from system.judge import Reference, check_exact

from unicron_lightning.local_cluster.processes import lives, until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]


def inject(cluster: Cluster, *faults: str) -> str:
    """The output of `unicron inject`."""
    done = cluster.unicron("inject", *faults, "--task", cluster.task)
    assert done.returncode == 0, done.stderr
    return done.stdout


def injected(cluster: Cluster, fault: str) -> dict[str, Any]:
    """Wait for the event of a fault."""
    found = cluster.watch(lambda: [e for e in cluster.events("fault_injected") if e["fault"] == fault], fault, 60)
    return dict(found[-1])


def died(cluster: Cluster, worker: str) -> dict[str, Any]:
    """Wait for the event of a worker's death."""
    found = cluster.watch(lambda: [e for e in cluster.events("worker_died") if e["worker"] == worker], "a death", 60)
    return dict(found[0])


def wait_over(cluster: Cluster) -> None:
    """Wait for the task's end, on a machine where starting and ending a worker may take a minute."""
    cluster.watch(lambda: cluster.notes("step"), "the first step", 150)
    cluster.watch(lambda: cluster.events("task_over"), "the task's end", 400, stalled=200)
    cluster.wait_end()


@pytest.mark.allow_leak("unix_sockets", reason="a SIGKILLed agent cannot remove its socket")
def test_orders(tmp_path: Path, reference: Reference) -> None:
    limits = ["coordinator.exit_when_idle=true", "coordinator.startup_linger=300"]
    with Cluster(tmp_path, settings={"pace": 0.05, "slow": 0.2}, coordinator=limits) as cluster:
        pid = cluster.coordinator()
        before = {line["rank"]: line["pid"] for line in cluster.wait_world(3)}
        # Faults that are recovered from without any death.
        inject(cluster, "stop rank=0 for=0.3s", "hang rank=1 for=0.2s phase=commit", "drop network rank=2 for=0.5s")
        for fault in ("stop rank=0 for=0.3s", "drop network rank=2 for=0.5s"):
            assert injected(cluster, fault)["target"], fault
        assert injected(cluster, "hang rank=1 phase=commit for=0.2s")["phase"] == "commit"
        (ordered,) = cluster.events("fault_ordered")
        assert ordered["fault"] == "hang rank=1 phase=commit for=0.2s" and ordered["rank"] == 1
        world = cluster.wait_world(3, after=time.time())
        assert {line["rank"]: line["pid"] for line in world} == before, "nobody died"
        # A worker is killed by its agent, and an agent by itself; rank 0 continues.
        assert inject(cluster, "kill rank=2").startswith("kill rank=2: n")
        struck = injected(cluster, "kill rank=2")
        dead = died(cluster, struck["worker"])
        assert (dead["cause"], dead["code"]) == ("signal", signal.SIGKILL) and dead["at"] >= struck["at"]
        cluster.watch(lambda: not lives(before[2]) and cluster.world()[0]["world"] >= 2, "a world without it", 60)
        inject(cluster, "kill agent rank=1")
        struck = injected(cluster, "kill agent rank=1")
        node = str(struck["node"])
        until("the agent's end", lambda: cluster.agents[node].poll() is not None)
        cluster.replace(node)
        cluster.wait_world(3, after=time.time())
        # The coordinator injects a fault into itself, and rejects unknown targets.
        assert "has no target" in cluster.unicron("inject", "kill rank=9", "--task", "task").stderr
        assert "kill coordinator: coordinator" in inject(cluster, "kill coordinator")
        assert injected(cluster, "kill coordinator")["target"] == "coordinator"
        until("the coordinator's end", lambda: not lives(pid), 60)
        cluster.start_coordinator()
        (tmp_path / "finish").touch()
        wait_over(cluster)
        print(check_exact(tmp_path, reference, workers=3))


def test_a_callback_strikes_once_whoever_takes_a_dead_ones_place(tmp_path: Path) -> None:
    faults = [
        "exit 7 rank=1 step=3 micro_batch=0",
        "raise connection_failed rank=0 step=6 phase=reduced",
        "kill coordinator step=7",
        "slow x2 rank=0 from_step=8 steps=2",
        "kill rank=all step=13 micro_batch=0",  # both ranks come here, as neither waits for the other
    ]
    settings = {"nodes": 2, "full": 2, "pace": 0.05, "slow": 0.15, "epochs": 2, "keep": -1, "faults": faults}
    with Cluster(tmp_path, agents=2, nodes="2:2", settings=settings) as cluster:
        wait_over(cluster)
        struck = cluster.events("fault_injected")
        kinds = [(event["kind"], event["step"]) for event in struck]
        assert kinds[:3] == [("exit", 3), ("raise", 6), ("slow", 8)], struck
        assert kinds[3:] == [("kill", 13)] * 2 and struck[3]["worker"] != struck[4]["worker"], struck
        first = died(cluster, struck[0]["worker"])
        assert (first["cause"], first["code"]) == ("exit", 7) and struck[0]["at"] <= first["at"]
        broken = [event["error"] for event in cluster.events("comm_error")]
        assert broken and all(broken), "a broken connection is no death, and its reason is reported"
        assert len(cluster.events("task_restarts")) == 1, "in the second life step 13 is an ordinary one"
        assert "does not allow fault injection" in "".join(
            (tmp_path / f"agent-n{place}.log").read_text() for place in range(2)
        ), "a script may not kill the coordinator that did not allow it"
