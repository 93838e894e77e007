"""Escalation with real processes: a crash loop is stopped, a bad node is cordoned, a hung recovery ends."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from system.cluster import Cluster
from system.judge import Reference, check_exact

from unicron_lightning.faults.fault import EXAMPLES
from unicron_lightning.local_cluster.processes import lives, until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(420)]


@contextmanager
def failing(folder: Path, *limits: str, agents: int, faults: Sequence[str] = (), **settings: Any) -> Iterator[Cluster]:
    """A cluster whose workers are struck by the faults, and a coordinator with small limits."""
    # An early exit would lose its limits: slow agents that register later would start their own coordinator.
    options = [*limits, "coordinator.exit_when_idle=true", "coordinator.startup_linger=300"]
    given = {"faults": list(faults), **settings}
    with Cluster(folder, agents=agents, settings=given, coordinator=options) as cluster:
        yield cluster


def test_a_script_that_raises_at_a_step_is_stopped_the_second_time_with_its_traceback(tmp_path: Path) -> None:
    faults = ["raise other_software_error rank=all from_step=4 phase=forward times=1000"]
    with failing(tmp_path, agents=2, faults=faults, full=2, slow=0.02) as cluster:
        assert set(cluster.wait_exit(150).values()) == {1}
        (stopped,) = cluster.events("task_stopped")
        assert stopped["step"] == 4
        assert stopped["rule"] == "the program fails"
        assert (stopped["times"], stopped["lives"]) == (2, 2)
        assert "RuntimeError in injector.py:" in stopped["fault"] and "after step 4" in stopped["fault"]
        assert stopped["causes"] == [f"RuntimeError: {EXAMPLES['other_software_error'].text}"]
        told = cluster.events("error_reported")
        assert {(error["kind"], error["phase"]) for error in told} == {("other_software_error", "compute")}
        assert {error["step"] for error in told} == {4}
        assert all("injector.py" in error["details"]["frames"][-1] for error in told)
        workers = [error["worker"] for error in told]
        assert len(set(workers)) == len(workers), "an error was told twice"
        before = [death["cause"] for death in cluster.events("worker_died") if death["at"] <= stopped["at"]]
        assert set(before) <= {"reported", "sibling"}, "those that were starting are told to end after that"
        assert set(stopped["nodes"]) <= {"n0", "n1"}
        (over,) = cluster.events("task_over")
        assert over["succeeded"] is False
        assert over["reason"] == stopped["reason"]
        assert not cluster.events("node_cordoned"), "it is no node's fault"
        for node in ("n0", "n1"):
            shown = (tmp_path / f"agent-{node}.log").read_text().rsplit("task_over", 1)[-1]
            assert EXAMPLES["other_software_error"].text in shown, "torchrun's user is told"
            assert "\n  at " in shown and "injector.py:" in shown
        assert {line["step"] for line in cluster.notes("step")} == {0, 1, 2, 3}


def test_a_wrong_setting_is_tried_once(tmp_path: Path) -> None:
    script = Path(__file__).with_name("wrong_setting.py")
    with Cluster(tmp_path, agents=2, nodes="2:2", script=script) as cluster:
        assert set(cluster.wait_exit(150).values()) == {1}
        (stopped,) = cluster.events("task_stopped")
        assert stopped["rule"] == "a value is wrong"
        assert "training_step(dataloader_iter) fetches its batches itself" in stopped["reason"]
    starts = (tmp_path / "starts").read_text().split()
    assert len(starts) <= 2, "nobody was started again"


@pytest.mark.parametrize("rules", [["severity.cordon_failures=2"], ["severity=paper", "detection=paper"]])
def test_a_node_on_which_every_worker_dies_is_cordoned_and_the_others_train_on(
    tmp_path: Path, rules: list[str]
) -> None:
    limits = [*rules, "cluster.warm_standby=false"]
    faults = ["raise other_software_error node=n1 rank=all phase=forward times=1000"]
    with failing(tmp_path, *limits, agents=2, faults=faults, full=1, pace=0.05) as cluster:
        cluster.watch(lambda: cluster.notes("step") and cluster.events("node_cordoned"), "the cordon", 150)
        (event,) = cluster.events("node_cordoned")
        assert event["node"] == "n1"
        assert EXAMPLES["other_software_error"].text in event["reason"]
        (world,) = cluster.wait_world(1, after=time.time())
        assert world["node"] == "n0"
        assert len({line["pid"] for line in cluster.notes("step")}) == 1, "n0 was never restarted"
        until("the agent's standing by", lambda: "cordoned: n1" in cluster.unicron("status").stdout, 60)
        assert cluster.agents["n1"].poll() is None
        died = len(cluster.events("worker_died"))
        cluster.finish()
        assert len(cluster.events("worker_died")) == died, "no worker was started on n1 any more"
        assert not cluster.events("task_stopped")


def test_by_the_papers_rules_a_step_that_takes_too_long_has_failed_without_a_witness(tmp_path: Path) -> None:
    with failing(tmp_path, "severity=paper", "detection=paper", agents=1, full=1, pace=0.05) as cluster:
        cluster.watch(lambda: cluster.notes.count("step") > 12, "an average", 120)
        cluster.inject("hang node=n0 phase=forward")
        cluster.watch(lambda: cluster.events("error_reported"), "the failed step", 120)
        (report,) = cluster.events("error_reported")
        assert (report["kind"], report["severity"], report["node"]) == ("unnamed_software_error", "SEV2", "n0")
        assert "injector.py" in report["details"]["stacks"]
        cluster.finish()
        assert len({line["pid"] for line in cluster.notes("step")}) == 2
        assert not cluster.events("node_cordoned"), "the one restart has helped"


def test_a_worker_that_hangs_in_a_recovery_is_killed_and_joins_again(tmp_path: Path, reference: Reference) -> None:
    with failing(tmp_path, "detection.recovery_time=5", agents=3) as cluster:
        before = {line["node"]: line["pid"] for line in cluster.wait_world(3)}
        for fault in ("hang node=n1 phase=exchange", "kill node=n0"):
            cluster.inject(fault)
        cluster.watch(lambda: cluster.events("workers_restarted"), "the restart", 60)
        (event,) = cluster.events("workers_restarted")
        assert (event["node"], event["kind"]) == ("n1", "recovery_stuck")
        until("the hung worker's end", lambda: not lives(before["n1"]))
        cluster.wait_world(3, after=time.time())
        cluster.finish()
        check_exact(tmp_path, reference, workers=3)
