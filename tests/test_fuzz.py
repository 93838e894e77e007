"""The fuzz tool fails when its coordinator dies or logs an error; else its result would mean nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TOOL = Path(__file__).parent.parent / "benchmarks" / "fuzz.py"


@pytest.mark.parametrize(("harm", "expected"), [("kill", '"deaths": 1'), ("traceback", '"tracebacks": 1')])
def test_it_fails_when_it_must(harm: str, expected: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, str(TOOL), "--minutes", "1.5", "--seed", "1", "--folder", str(folder)]
    tool = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        file = folder / "state" / "coordinator.json"
        deadline = time.monotonic() + 60
        while not file.exists() or not file.read_text().strip():
            assert time.monotonic() < deadline and tool.poll() is None
            time.sleep(0.05)
        if harm == "kill":
            os.kill(int(json.loads(file.read_text())["pid"]), signal.SIGKILL)
        else:
            with (folder / "coordinator.log").open("a") as log:
                log.write("Traceback (most recent call last):\n")
        output, _ = tool.communicate(timeout=80)
    finally:
        tool.kill()
        tool.wait()
    assert tool.returncode == 1
    assert "FAILED" in output and expected in output
