"""A worker that trains something else is refused when the task begins, and when it joins."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults.cluster import Cluster, until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(420)]
SCRIPT = Path(__file__).with_name("differing.py")


def test_a_worker_with_another_learning_rate_is_refused_with_the_values_and_its_node(tmp_path: Path) -> None:
    with Cluster(tmp_path, agents=2, nodes="1:2", script=SCRIPT) as cluster:
        database = cluster.state_dir / "coordinator.sqlite"
        until("the coordinator", database.exists, 120)
        cluster.watch(lambda: len(cluster.events("error_reported")) > 1, "two refusals: one of a joiner", 240)
        for report in cluster.events("error_reported"):
            assert report["node"] in ("n0", "n1")
            assert f"the worker on node {report['node']} differs from the others of its task: optimizer is SGD" in (
                report["cause"] + str(report["details"])
            )
