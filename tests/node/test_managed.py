"""Submitted tasks on real daemons: they run, log, end, are cancelled, and survive deaths of the processes that run
them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from agent.torchrun import Cluster, until, workers_of
from node.managed import Managed, gone, kill, unicron

pytestmark = [pytest.mark.timeout(240)]


def test_a_job_runs_on_two_nodes_and_ends_well(tmp_path: Path) -> None:
    with Managed(tmp_path) as managed:
        managed.start("n0")
        managed.start("n1")
        managed.submit("j", "agent/greeting_worker.py", min_nodes=2, max_nodes=2, environment={"GREETING": "hello"})
        managed.wait_events(2, "go", world=2)
        top = managed.unicron("top", "--once", "--interval", "0.1")
        assert "2 of 2:2" in top
        assert "n1" in top
        status = json.loads(managed.unicron("status", "--json"))
        assert status["assigned"] == {"n0/0": "j", "n1/0": "j"}
        assert status["nodes"]["n0"]["slots"] == {"0": {"assigned": "j", "agents": ["j"]}}
        log = tmp_path / "logs" / "j" / "n0" / "0" / "rank0.log"
        until("its log", lambda: "hello" in log.read_text())
        assert "hello" in managed.unicron("logs", "j", "--rank", "1", "--logs", str(managed.logs))
        (tmp_path / "finish").touch()
        managed.wait_job("j", "succeeded")
        until("the agents' end", lambda: not managed.below("n0") and not managed.below("n1"))
        assert "ended with status 0" in (log.parent / "agent.log").read_text()


def test_cancel_stops_everything_of_a_job(tmp_path: Path) -> None:
    with Managed(tmp_path) as managed:
        managed.start("n0")
        managed.submit("j", "agent/toy_worker.py")
        managed.wait_events(1, "started")
        processes = managed.below("n0")
        assert len(processes) >= 2
        assert managed.unicron("cancel", "j") == "j: cancelled\n"
        until("the end of all its processes", lambda: gone(processes), 60)
        assert managed.jobs() == {"j": "cancelled"}
        assert managed.unicron("cancel", "j", status=2) == "unicron: no task 'j'; expected one of: []\n"


def test_cancel_stops_a_task_that_its_user_started(tmp_path: Path) -> None:
    with Cluster(tmp_path, "plain_worker.py", "1:1") as cluster:
        cluster.start()
        cluster.wait_events(1, "started")
        (worker,) = until("its worker", lambda: workers_of(cluster.agents[0].pid))
        unicron("cancel", "task", "--endpoint", f"127.0.0.1:{cluster.port}")
        assert cluster.agents[0].wait(60) == 1
        assert gone([worker])


def test_killed_daemons_and_coordinators(tmp_path: Path) -> None:
    with Managed(tmp_path) as managed:
        managed.start("n0")
        managed.start("n1")
        managed.submit("j", "agent/toy_worker.py", min_nodes=1, max_nodes=2)
        managed.wait_events(2, "go", world=2)
        pids = {line["pid"] for line in managed.events("started")}
        managed.coordinator.kill()
        managed.coordinator.start()
        until("both daemons' return", lambda: managed.connected() == ["n0", "n1"])
        assert {line["pid"] for line in managed.events("started")} == pids, "nobody was started anew"
        processes = managed.below("n0")
        kill(managed.daemons["n0"])
        until("the end of what it ran", lambda: gone(processes), 60)
        managed.start("n0")
        managed.wait_events(3, "started")
        newest = managed.wait_events(4, "go", world=2)[-1]
        assert newest["number"] > 1
        (tmp_path / "finish").touch()
        managed.wait_job("j", "succeeded")
