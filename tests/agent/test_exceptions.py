"""An exception outside a trainer reaches the coordinator before the worker's exit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from agent.fake_coordinator import FakeCoordinator

from unicron_lightning import wire

SCRIPT = Path(__file__).with_name("raising_worker.py")

pytestmark = pytest.mark.faults


def test_an_exception_before_the_trainer_is_told_and_everybody_s_record_of_it_stays(tmp_path: Path) -> None:
    with FakeCoordinator().serving() as coordinator:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "unicron", "--nnodes", "1"),
            *("--rdzv-endpoint", f"127.0.0.1:{coordinator.port}", "--rdzv-id", "t", "--max-restarts", "0"),
            *("--rdzv-conf", "embedded=false", str(SCRIPT), str(tmp_path)),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        told = coordinator.wait_for(wire.ErrorReport)
        died = coordinator.wait_for(wire.WorkerDied)
        order = [type(message) for _, message in coordinator.said]
    assert (told.kind, told.phase, told.ends) == ("connection_failed", "script", True)
    assert told.cause == "ConnectionResetError: [Errno 104] Connection reset by peer"
    assert told.details["frames"][-1].endswith("raising_worker.py:18 <module>")
    assert (told.worker, died.cause, died.code) == (died.worker, "exit", 1)
    assert order.index(wire.ErrorReport) < order.index(wire.WorkerDied)
    assert "ConnectionResetError: [Errno 104]" in done.stderr, "the traceback"
    assert "ChildFailedError" in done.stderr, "torchelastic's record"
    assert (tmp_path / "mine").read_text() == "ConnectionResetError", "the script's own hook"
