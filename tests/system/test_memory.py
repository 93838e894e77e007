"""All workers die, but no agent: the next life resumes from the state in their memory."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from system.cluster import SCRIPT, Cluster, Notes
from system.cluster import SETTINGS as SYSTEM
from system.judge import Reference, check_exact

from unicron_lightning.local_cluster.cluster import LocalCluster
from unicron_lightning.local_cluster.processes import kill, until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(420)]

SETTINGS = {"pace": 0.05, "epochs": 5, "keep": -1, "memory": [4, 1]}


def after_step(cluster: Cluster, step: int) -> dict[str, int]:
    """Wait until all three have finished a step; return the process of each node's worker."""
    done = lambda: len(cluster.world()) == 3 and all(line["step"] >= step for line in cluster.world())  # noqa: E731
    cluster.watch(done, f"step {step}", 180)
    return {line["node"]: line["pid"] for line in cluster.world()}


def check_restored(cluster: Cluster, tier: str) -> dict[str, Any]:
    """Check the steps lost in the only restart; return its restoration."""
    (restored,) = restored_from(cluster, tier)
    (restart,) = cluster.events("task_restarts")
    assert restored["step"] == restart["memory" if tier == "memory" else "step"]
    assert restored["at"] - restart["at"] < 100, "30 s for workers of nodes with parts, and the workers' start"
    last = max(line["step"] for line in cluster.notes("step", life=1)) + 1
    assert 0 <= last - restored["step"] <= (4 if tier == "memory" else 10)
    assert min(line["step"] for line in cluster.notes("step", life=2)) == restored["step"]
    return restored


def held(cluster: Cluster, node: str) -> list[Path]:
    """The memory that an agent holds open, as files that this user may write."""
    folder = Path(f"/proc/{cluster.agents[node].pid}/fd")
    return [path for path in folder.iterdir() if path.is_symlink() and "unicron-state" in os.readlink(path)]


def restored_from(cluster: Cluster, tier: str) -> list[dict[str, Any]]:
    """The events of restorations from a kind of place."""
    return [event for event in cluster.events("worker.state_restored") if event["tier"] == tier]


@pytest.mark.chaos
def test_all_workers_die_and_one_agents_copies_are_corrupt(tmp_path: Path, reference: Reference) -> None:
    with Cluster(tmp_path, nodes="3:3", settings=SETTINGS) as cluster:  # all three are founders
        for pid in after_step(cluster, 25).values():
            kill(pid)
        cluster.watch(lambda: cluster.events("task_restarts"), "the next life", 60)
        assert held(cluster, "n1"), "the agent has outlived its worker"
        for path in held(cluster, "n0"):
            with path.open("r+b") as file:
                file.write(b"not a state")
        cluster.wait_end(linger=True)
        restored = check_restored(cluster, "memory")
        assert all(len(nodes) == 2 for nodes in restored["holders"])
        rejected = cluster.events("worker.memory_rejected")
        assert len(rejected) == 2, "both copies that n0 has of the version"
        check_exact(tmp_path, reference, workers=3)


CASES = [  # nodes that die with their agents, and do they return; partners; source of the state, or all nodes of a rack
    (("n1", "n2"), False, 2, "memory"),
    (("n1", "n2"), True, 2, "memory"),
    (("n1", "n2"), False, 1, "disk"),
    (("n1",), False, 1, "memory"),
    (("n0", "n1"), False, 1, "rack"),
]


@pytest.mark.chaos  # as the next test, to keep `make test` short
@pytest.mark.parametrize(("nodes", "return_", "partners", "tier"), CASES)
def test_nodes_die_with_all_workers(
    nodes: tuple[str, ...], return_: bool, partners: int, tier: str, tmp_path: Path, reference: Reference
) -> None:
    """The new life begins without these nodes."""
    settings = {**SETTINGS, "memory": [4, partners]}
    racks = {"n0": "r", "n1": "r", "n2": "s"} if tier == "rack" else {}
    tier = "memory" if tier == "rack" else tier
    with Cluster(tmp_path, settings=settings, racks=racks, leaves="agent-*/*") as cluster:
        workers = after_step(cluster, 25)
        for node in nodes:
            kill(cluster.agents[node].pid)
        for node in workers.keys() - set(nodes):
            kill(workers[node])
        cluster.watch(lambda: cluster.events("task_restarts"), "the next life", 60)
        for node in nodes:
            if return_:
                cluster.replace(node)
            else:
                cluster.agents.pop(node).wait(60)
        cluster.wait_end(linger=True)
        restored = check_restored(cluster, tier)
        if not return_:
            left = {f"n{place}" for place in range(3)} - set(nodes)
            assert all(left.issuperset(holders) for holders in restored.get("holders", []))
        check_exact(tmp_path, reference, workers=3 if return_ else 3 - len(nodes))


@pytest.mark.chaos
def test_all_workers_die_while_the_coordinator_is_away_and_agents_stand_still(
    tmp_path: Path, reference: Reference
) -> None:
    """Agents get what dead workers have handed over, and report their copies to the next coordinator."""
    faults = [f"kill rank={rank} step=27 micro_batch=0" for rank in range(3)]
    schedule = [{"world": 3, "step": 27, "faults": faults, "together": True}]
    with Cluster(tmp_path, nodes="3:3", schedule=schedule, settings=SETTINGS) as cluster:
        cluster.watch(lambda: any(line["step"] >= 22 for line in cluster.notes("step")), "step 22", 180)
        pid = cluster.coordinator()
        assert pid is not None and kill(pid, signal.SIGSTOP)
        for agent in cluster.agents.values():
            agent.send_signal(signal.SIGSTOP)
        cluster.watch(lambda: len(cluster.notes("fault")) == 3, "the deaths", 60)
        assert kill(pid)
        for agent in cluster.agents.values():
            agent.send_signal(signal.SIGCONT)
        until("another coordinator", lambda: cluster.coordinator() not in (None, pid), 120)
        cluster.wait_end(linger=True)
        (restored,) = restored_from(cluster, "memory")
        assert restored["step"] == 24
        assert not restored_from(cluster, "disk")
        check_exact(tmp_path, reference, workers=3)


def test_a_whole_cluster_is_switched_off(tmp_path: Path, reference: Reference) -> None:
    """A submitted task resumes from disk: the memory of all agents is gone."""
    (tmp_path / "settings.json").write_text(json.dumps({**SYSTEM, **SETTINGS}))
    (tmp_path / "schedule.json").write_text("[]")
    notes = Notes(tmp_path)
    with LocalCluster(nodes=3, folder=tmp_path) as cluster:
        environment = {"OMP_NUM_THREADS": "1", "COORDINATOR_FILE": str(cluster.state_dir / "coordinator.json")}
        cluster.submit("task", [SCRIPT, tmp_path], min_nodes=3, max_nodes=3, environment=environment)
        until("step 26", lambda: any(line["step"] >= 26 for line in notes("step")), 180)
        cluster.kill_coordinator()
        for node in list(cluster.agents):
            cluster.kill_node(node)
        cluster.start_coordinator()
        for node in list(cluster.agents):
            cluster.start_node(node)
        cluster.wait_state("succeeded", 180, "task")
        restored = [event["fields"] for event in cluster.events("worker.state_restored")]
        assert [(each["tier"], each["step"]) for each in restored] == [("disk", 20)]
        assert cluster.events("memory_offered")[-1]["fields"]["steps"] == []
    check_exact(tmp_path, reference, workers=3)
