"""More workers than micro-batches: those that are not needed stand by, and end well with the task."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from test_parity import free_port, launch  # noqa: E402 - test helpers

sys.path.remove(str(HERE))

SCRIPT = """
import os, sys
sys.path.insert(0, {here!r})
from pathlib import Path
import scenarios
result = scenarios.fit(Path({folder!r}), number=16, devices=1)
Path({folder!r}, "trained-" + os.environ["RANK"]).write_text(str(len(result["losses"])))
"""


def test_a_worker_without_a_micro_batch_stands_by(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(here=str(HERE), folder=str(tmp_path)))
    agent = ["--nnodes", "1", "--nproc-per-node", "2", "--rdzv-backend", "unicron", "--rdzv-id", "standby"]
    endpoint = ["--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    launch([*agent, *endpoint, str(script)], tmp_path, 60, UNICRON_STATE_DIR=str(tmp_path / "state"))
    assert [path.read_text() for path in tmp_path.glob("trained-*")] == ["8"], "one worker trained, all ended well"
