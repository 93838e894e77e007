"""An exit with status 0 in the middle of a run ends no task."""

from __future__ import annotations

from pathlib import Path

import pytest
from system.cluster import Cluster

pytestmark = [pytest.mark.faults, pytest.mark.timeout(420)]
SCRIPT = Path(__file__).with_name("leaving.py")


def test_a_script_that_leaves_in_the_middle_has_failed_and_is_started_anew(tmp_path: Path) -> None:
    (tmp_path / "how").write_text("exit")
    with Cluster(tmp_path, agents=1, nodes="1", script=SCRIPT) as cluster:
        cluster.wait_end()
        (report,) = cluster.events("error_reported")
        assert "the script left by SystemExit(0) in the middle of a run, after step 3" in report["cause"]
        (death,) = cluster.events("worker_died")
        assert death["cause"] == "reported"
        (over,) = cluster.events("task_over")
        assert over["succeeded"] is True
    assert (tmp_path / "fits").read_text().split() == ["0", "0", "1"]
    assert (tmp_path / "after").exists()


def test_a_process_that_ends_with_status_0_in_the_middle_has_not_finished_the_task(tmp_path: Path) -> None:
    (tmp_path / "how").write_text("_exit")
    with Cluster(tmp_path, agents=1, nodes="1", script=SCRIPT) as cluster:
        cluster.wait_end()
        (death,) = cluster.events("worker_died")
        assert (death["cause"], death["code"]) == ("exit", 77)
        assert "in the middle of a run" in death["meaning"]
        (over,) = cluster.events("task_over")
        assert over["succeeded"] is False
