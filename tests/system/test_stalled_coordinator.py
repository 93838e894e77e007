"""An operator's coordinator stands still for a while: a healthy task trains on, and no incident follows."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from system.cluster import Cluster
from system.judge import Reference, check_exact

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

STALLS = (0.7, 1.5, 3.0, 6.0)


def test_a_stalled_coordinator_declares_nobody_lost(tmp_path: Path, reference: Reference) -> None:
    with Cluster(tmp_path, coordinator=(), settings={"pace": 0.05}) as cluster:
        epochs = {line["epoch"] for line in cluster.wait_world(3)}
        for seconds in STALLS:
            cluster.kill_coordinator(signal.SIGSTOP)
            time.sleep(seconds)
            cluster.kill_coordinator(signal.SIGCONT)
            time.sleep(3)
        assert {line["epoch"] for line in cluster.wait_world(3, after=time.time())} == epochs
        assert not cluster.events("worker_died")
        assert not cluster.events("error_reported"), "no link is taken for a flapping one"
        cluster.finish()
        check_exact(tmp_path, reference, workers=3)
