"""A worker that lives and makes no progress: found by comparing the ranks, named, its stacks shown, killed, healed."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults.cluster import Cluster
from faults.judge import Reference, check_exact
from faults.test_other_faults import fault, group

pytestmark = [pytest.mark.faults, pytest.mark.timeout(200)]


def test_workers_that_hang_are_named_killed_and_replaced(tmp_path: Path, reference: Reference) -> None:
    schedule = [
        group(fault("training_step", rank=1, signal="HANG"), settled=12),
        group(fault("training_step", rank=2, signal="HANG", holds_interpreter=True), settled=16),
    ]
    with Cluster(tmp_path, schedule=schedule) as cluster:
        cluster.finish(180)
        hung = cluster.notes("fault")
        reports = cluster.events("error_reported")
        assert [report["kind"] for report in reports] == ["task_hang"] * 2, reports
        for line, report in zip(hung, reports, strict=True):
            print(f"hung; reported after {report['happened_at'] - line['at']:.2f} s: {report['cause']}")
            assert (report["rank"], report["node"]) == (line["rank"], line["node"])
            assert "stuck_on_purpose" in report["details"]["stacks"], report
            assert "unicron-control" in report["details"]["stacks"] or "control.py" in report["details"]["stacks"]
        assert reports[0]["phase"] == "compute" and reports[0]["details"]["waiting"] == 2
        deaths = cluster.events("worker_died")
        assert [death["cause"] for death in deaths] == ["reported"] * 2, "told once: the kill is no failure of its own"
        check_exact(tmp_path, reference, workers=3)
