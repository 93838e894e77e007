"""Submitted tasks on real daemons: they run, log, end, are cancelled, and survive deaths of the processes that run
them.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import psutil
import pytest
from agent.torchrun import Cluster, noted, wait_noted, workers_of

from unicron_lightning.local_cluster.cluster import LocalCluster
from unicron_lightning.local_cluster.processes import until

pytestmark = [pytest.mark.timeout(240)]
TESTS = Path(__file__).parents[1]


def below(cluster: LocalCluster, node: str) -> list[psutil.Process]:
    """Return all processes that a daemon has started, directly or not."""
    return list(psutil.Process(cluster.agents[node].pid).children(recursive=True))


def connected(cluster: LocalCluster) -> list[str]:
    """Return the nodes whose daemon has a connection."""
    return sorted(label for label, node in cluster.status()["nodes"].items() if node["connected"])


def gone(processes: list[psutil.Process]) -> bool:
    """Return whether all of them have ended."""
    return all(not each.is_running() or each.status() == psutil.STATUS_ZOMBIE for each in processes)


def test_a_job_runs_on_two_nodes_and_ends_well(tmp_path: Path) -> None:
    with LocalCluster(nodes=2, folder=tmp_path) as cluster:
        command = [str(TESTS / "agent/greeting_worker.py"), str(tmp_path)]
        job = {"command": command, "min_nodes": 2, "max_nodes": 2, "environment": {"GREETING": "hello"},
               "python": sys.prefix, "activate": ["export FROM_SHELL=yes"], "secrets": {"KEY": "file:key"}}  # fmt: skip
        (tmp_path / "key").write_text("of the node\n")
        (tmp_path / "j.yaml").write_text(json.dumps(job))
        assert cluster.unicron("submit", str(tmp_path / "j.yaml")).stdout in ("j: queued\n", "j: running\n")
        wait_noted(tmp_path, 2, "go", world=2)
        top = cluster.unicron("top", "--once", "--interval", "0.1").stdout
        assert "2 of 2:2" in top
        assert "node1" in top
        status = cluster.status()
        assert status["assigned"] == {"node0/0": "j", "node1/0": "j"}
        assert status["nodes"]["node0"]["slots"] == {"0": {"assigned": "j", "agents": ["j"]}}
        log = tmp_path / "logs" / "j" / "node0" / "0" / "rank0.log"
        until("its log", lambda: "hello yes of the node False\n" in log.read_text())
        assert "hello" in cluster.unicron("logs", "j", "--rank", "1", "--logs", str(tmp_path / "logs")).stdout
        (tmp_path / "finish").touch()
        cluster.wait_state("succeeded", task="j")
        until("the agents' end", lambda: not below(cluster, "node0") and not below(cluster, "node1"))
        assert "ended with status 0" in (log.parent / "agent.log").read_text()


def test_cancel_stops_everything_of_a_job(tmp_path: Path) -> None:
    with LocalCluster(folder=tmp_path) as cluster:
        cluster.submit("j", [TESTS / "agent/toy_worker.py", tmp_path])
        wait_noted(tmp_path, 1, "started")
        processes = below(cluster, "node0")
        assert len(processes) >= 2
        assert cluster.unicron("cancel", "j").stdout == "j: cancelled\n"
        until("the end of all its processes", lambda: gone(processes), 60)
        assert [(job["name"], job["state"]) for job in cluster.fetch("/v1/jobs")] == [("j", "cancelled")]
        again = cluster.unicron("cancel", "j")
        assert (again.returncode, again.stderr) == (2, "unicron: no task 'j'; expected one of: []\n")


def test_cancel_stops_a_task_that_its_user_started(tmp_path: Path) -> None:
    with Cluster(tmp_path, "plain_worker.py", "1:1") as cluster:
        cluster.add_node()
        cluster.wait_notes(1, "started")
        (worker,) = until("its worker", lambda: workers_of(cluster.agents["node0"].pid))
        assert cluster.unicron("cancel", "task").returncode == 0
        assert cluster.wait_exit(60) == {"node0": 1}
        assert gone([worker])


def test_killed_daemons_and_coordinators(tmp_path: Path) -> None:
    with LocalCluster(nodes=2, folder=tmp_path) as cluster:
        cluster.submit("j", [TESTS / "agent/toy_worker.py", tmp_path], min_nodes=1, max_nodes=2)
        wait_noted(tmp_path, 2, "go", world=2)
        pids = {line["pid"] for line in noted(tmp_path, "started")}
        cluster.kill_coordinator()
        cluster.start_coordinator()
        until("both daemons' return", lambda: connected(cluster) == ["node0", "node1"])
        assert {line["pid"] for line in noted(tmp_path, "started")} == pids, "nobody was started anew"
        processes = below(cluster, "node0")
        cluster.kill_agent("node0")
        until("the end of what it ran", lambda: gone(processes), 60)
        cluster.start_node("node0")
        wait_noted(tmp_path, 3, "started")
        newest = wait_noted(tmp_path, 4, "go", world=2)[-1]
        assert newest["number"] > 1
        (tmp_path / "finish").touch()
        cluster.wait_state("succeeded", task="j")


def test_a_job_whose_hold_is_too_long_ends_with_the_reason(tmp_path: Path) -> None:
    with LocalCluster(nodes=2, folder=tmp_path, coordinator=["severity.hold_timeout=1"]) as cluster:
        job = {"command": [str(TESTS / "agent/toy_worker.py"), str(tmp_path)], "min_nodes": 2, "max_nodes": 2}
        (tmp_path / "j.yaml").write_text(json.dumps(job))
        cluster.unicron("submit", str(tmp_path / "j.yaml"))
        wait_noted(tmp_path, 2, "go", world=2)
        processes = below(cluster, "node0")
        cluster.kill_node("node1")
        cluster.wait_state("failed", task="j")
        (shown,) = json.loads(cluster.unicron("jobs", "--json").stdout)
        why = r"held below the minimum of 2 nodes: for \d+ s \(severity.hold_timeout\); the last failure, on node1: .+"
        assert re.fullmatch(why, shown["reason"])
        until("the end of all its processes", lambda: gone(processes), 60)
        log = tmp_path / "logs" / "j" / "node0" / "0" / "agent.log"
        # a signal, if the daemon stopped it first
        until("its status", lambda: re.search(r"ended with (?!status 0)", log.read_text()))
