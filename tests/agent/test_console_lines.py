"""A warning of an agent does not continue the line of a progress bar."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

CODE = """
import logging, os, sys
from unicron_lightning.agent import handler
handler.install_fresh_lines()
handler.install_fresh_lines()
os.write(1, b"Epoch 0:  44%")
logging.getLogger("unicron_lightning.agent.signals").warning("agent_departs signal=%s", "SIGTERM")
"""


def output(**variables: str) -> str:
    command, own = [sys.executable, "-c", CODE], {**os.environ, **variables}
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(command, **both, env=own, check=True, text=True, timeout=60).stdout  # type: ignore[call-overload]


def test_in_a_file_the_bars_line_ends_first() -> None:
    assert output() == "Epoch 0:  44%\nagent_departs signal=SIGTERM\n"


def test_logs_of_a_daemon_have_no_bar() -> None:
    assert output(UNICRON_LOGS="/logs") == "Epoch 0:  44%agent_departs signal=SIGTERM\n"


def test_on_a_terminal_the_bars_line_is_erased() -> None:
    ours, theirs = pty.openpty()
    subprocess.run([sys.executable, "-c", CODE], stdout=theirs, stderr=theirs, check=True, timeout=60)
    os.close(theirs)
    text = os.read(ours, 4096).decode()
    os.close(ours)
    assert text == "Epoch 0:  44%\r\x1b[Kagent_departs signal=SIGTERM\r\n"
