"""A terminated worker exits with a status, wherever the signal arrives."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from programs.launching import PROGRAMS

SCRIPT = PROGRAMS / "changing_worker.py"


@pytest.mark.parametrize("place", ["training_step", "validation_step", "epoch_start"])
def test_a_terminated_worker_ends_with_a_status(place: str, tmp_path: Path) -> None:
    """Lightning raises by itself after a step or in an evaluation; at an epoch's start nothing raises before the next
    boundary.
    """
    steps = tmp_path / "events.jsonl"
    process = subprocess.Popen([sys.executable, str(SCRIPT), str(tmp_path)], stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not (steps.exists() and '"step"' in steps.read_text()):
            assert time.monotonic() < deadline and process.poll() is None, "it does not train"
            time.sleep(0.05)
        (tmp_path / f"terminate-{place}-{process.pid}").touch()
        _, said = process.communicate(timeout=40)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 128 + signal.SIGTERM, said
    assert not list(tmp_path.glob("result-*")), "the script went on after its training was ended"
    assert json.loads(steps.read_text().splitlines()[-1])["what"] == "step"
