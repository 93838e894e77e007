"""The demo itself, with real processes and signals: its own checks decide."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def play(act: int, out: Path, seconds: float) -> None:
    """Plays one act, which must show all that it claims."""
    command = [sys.executable, "-m", "unicron_lightning.demo", "--act", str(act), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "FAIL" not in done.stdout


@pytest.mark.timeout(400)
def test_the_demo_heals_three_failures_and_proves_it(tmp_path: Path) -> None:
    play(1, tmp_path / "out", 380)
    assert (tmp_path / "out" / "loss.png").stat().st_size > 10_000


@pytest.mark.timeout(560)
def test_two_tasks_share_a_cluster_through_a_nodes_death(tmp_path: Path) -> None:
    play(2, tmp_path / "out", 540)
    assert (tmp_path / "out" / "sharing" / "sharing.png").stat().st_size > 10_000
