"""The processes of `make experiments` end with it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "experiments" / "document.py"
COMMAND = (sys.executable, str(SCRIPT), "--only", "mtbf", "--processes", "2")


def children(pid: int) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def used(pid: int) -> float:
    """Return its CPU time in clock ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return float(fields[11]) + float(fields[12])


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left(how: signal.Signals, tmp_path: Path) -> None:
    with (tmp_path / "output").open("wb") as output:
        command = subprocess.Popen(
            [*COMMAND, "--folder", str(tmp_path)],
            stderr=output,
            start_new_session=True,
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
        )
    try:
        deadline = time.monotonic() + 60
        while len(busy := [pid for pid in children(command.pid) if used(pid) > 20]) < 2:
            assert command.poll() is None and time.monotonic() < deadline, (tmp_path / "output").read_text()
            time.sleep(0.02)
        command.send_signal(how)
        status = command.wait(30)
        assert status == 128 + how if how == signal.SIGTERM else status == -how
        while any(alive(pid) for pid in busy):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert not (tmp_path / "results.md").exists()
    finally:
        if command.poll() is None:
            command.kill()
            command.wait()
