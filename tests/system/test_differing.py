"""A worker that trains something else is refused; one whose parameters differ from the others' is replaced."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from system.cluster import Cluster

from unicron_lightning.local_cluster.processes import until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(420)]
SCRIPT = Path(__file__).with_name("differing.py")


def test_a_worker_with_another_learning_rate_is_refused_with_the_values_and_its_node(tmp_path: Path) -> None:
    with Cluster(tmp_path, agents=2, nodes="1:2", script=SCRIPT) as cluster:
        until("the coordinator", cluster.coordinator, 120)
        cluster.watch(lambda: len(cluster.events("error_reported")) > 1, "two refusals: one of a joiner", 240)
        for report in cluster.events("error_reported"):
            assert report["node"] in ("n0", "n1")
            said = report["cause"] + str(report["details"])
            assert f"the worker on node {report['node']} differs from the others of its task: optimizer is SGD(" in said
            assert re.search(r"optimizer is SGD\(.*lr=0\.0[12], .*, expected SGD\(.*lr=0\.0[12], ", said), said


def test_a_task_ends_when_its_only_other_node_is_refused_again_and_again(tmp_path: Path) -> None:
    with Cluster(tmp_path, agents=2, nodes="2:2", script=SCRIPT, max_restarts=2) as cluster:
        statuses = cluster.wait_exit(240)
        assert set(statuses.values()) == {1}
        [stopped] = cluster.events("task_stopped")
        assert "WorkersDiffer" in stopped["reason"]
        refused = re.findall(r"no other node is left, and (n\d) fails", stopped["reason"])
        [survivor] = set(statuses) - set(refused)
        said = (tmp_path / f"agent-{survivor}.log").read_text()
        assert "failed: WorkersDiffer: the worker on node" in said and "held below the minimum" in said


@pytest.mark.parametrize("strategy", ["whole", pytest.param("sharded", marks=pytest.mark.chaos)])
def test_a_flipped_bit_is_found_and_its_worker_replaced(tmp_path: Path, strategy: str) -> None:
    (tmp_path / strategy).touch()
    script = SCRIPT.with_name("flipping.py")
    with Cluster(tmp_path, agents=3, nodes="3:3", script=script) as cluster:
        until("the coordinator", cluster.coordinator, 120)
        reports = cluster.watch(lambda: cluster.events("error_reported"), "the odd worker's report", 240)
        cluster.watch(lambda: _joined(cluster), "its successor, with the others' parameters", 240)
        (tmp_path / "finish").touch()
        cluster.wait_end()
        assert [report["node"] for report in reports] == ["n1"]
        said = reports[0]["cause"] + str(reports[0]["details"])
        assert "at step 10 the parameters of rank" in said
        assert "on node n1 differ from those of the other 2 workers" in said
        assert len({(tmp_path / f"digest-n{node}").read_text() for node in range(3)}) == 1


def test_with_stop_a_flipped_bit_ends_the_task_with_one_error_on_all_nodes(tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    with Cluster(tmp_path, agents=3, nodes="3:3", script=SCRIPT.with_name("flipping.py")) as cluster:
        assert set(cluster.wait_exit(240).values()) == {1}
        [stopped] = cluster.events("task_stopped")
        [report] = cluster.events("error_reported")
        assert report["kind"] == "parameters_differ" and report["cause"] in stopped["reason"]
        assert "on node n1 differ from those of the other 2 workers" in report["cause"]
        for node in range(3):
            assert stopped["reason"] in (tmp_path / f"agent-n{node}.log").read_text()


def _joined(cluster: Cluster) -> bool:
    return any(event["kind"] == "join" and event["world"] == 3 for event in cluster.events("worker.entered_epoch"))
