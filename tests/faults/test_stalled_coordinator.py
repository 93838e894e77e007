"""An operator's coordinator stands still for a while: a healthy task trains on, and no incident follows."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from faults.cluster import Cluster, until
from faults.judge import Reference, check_exact

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

STALLS = (0.7, 1.5, 3.0, 6.0)


def test_a_stalled_coordinator_declares_nobody_lost(tmp_path: Path, reference: Reference) -> None:
    cluster = Cluster(tmp_path, agents=0)
    operator = tmp_path / "operator"
    operator.mkdir()
    command = [sys.executable, "-m", "unicron_lightning.coordinator", f"coordinator.port={cluster.port}"]
    with (tmp_path / "operator.log").open("wb") as log:
        coordinator = subprocess.Popen([*command, f"store.state_dir={operator}"], stderr=log)
    try:
        with cluster:
            until("the coordinator", (operator / "coordinator.json").exists)
            for node in ("n0", "n1", "n2"):
                cluster.start(node)
            cluster.state_dir = operator
            epochs = {line["epoch"] for line in cluster.wait_world(3)}
            for seconds in STALLS:
                coordinator.send_signal(signal.SIGSTOP)
                time.sleep(seconds)
                coordinator.send_signal(signal.SIGCONT)
                time.sleep(4)
            assert {line["epoch"] for line in cluster.wait_world(3, after=time.time())} == epochs
            assert not cluster.events("worker_died")
            cluster.finish()
            check_exact(tmp_path, reference, workers=3)
    finally:
        coordinator.kill()
        coordinator.wait()
