"""The demo itself, with real processes and signals: its own checks decide."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(400)
def test_the_demo_heals_three_failures_and_proves_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "unicron_lightning.demo", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "FAIL" not in done.stdout
    assert (tmp_path / "out" / "loss.png").stat().st_size > 10_000
