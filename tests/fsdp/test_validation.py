"""Validations of a sharded model in a process without torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fsdp.evaluating import SAMPLES


@pytest.mark.timeout(120)
def test_validations() -> None:
    """Random numbers are those of the batch, wherever it was fetched; a pass is whole, and no more is read."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UNICRON_")}
    command = [sys.executable, str(Path(__file__).with_name("evaluating.py"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["random"][0] == found["random"][1]
    assert found["scheduled"] == [*range(SAMPLES)] * 2
    assert found["limited"] == [[0, 1, 2, 3], 4]
    assert found["listed"] == [0, 1, *range(SAMPLES)]
