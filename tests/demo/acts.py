"""Runs the demo, with real processes and signals: its own checks decide."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from unicron_lightning import environ


def play(act: int, out: Path, seconds: float) -> None:
    """Run one act, which must show all its claims, with prepared workers as a user does."""
    variables = {name: value for name, value in os.environ.items() if name != environ.PREPARE}
    command = [sys.executable, "-m", "unicron_lightning.demo", "--act", str(act), "--out", str(out)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "FAIL" not in done.stdout
