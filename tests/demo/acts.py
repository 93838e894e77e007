"""Runs the demo, with real processes and signals: its own checks decide."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def play(act: int, out: Path, seconds: float) -> None:
    """Run one act, which must show all its claims."""
    command = [sys.executable, "-m", "unicron_lightning.demo", "--act", str(act), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "FAIL" not in done.stdout
