"""The commands of docs/first-day.md work in their order from the wheel, and print what the document shows."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import psutil
import pytest
from examples.conftest import Installed

from unicron_lightning.local_cluster.processes import free_port, until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(500)]
ROOT = Path(__file__).parents[2]
INSTALL = "$ python -m pip install"
END = "=== end of a step"
MOST_SECONDS = 100.0
"""Of a step: on a busy machine workers take long to start."""


def steps(text: str) -> list[tuple[str, list[str]]]:
    """Return each command of a document with the lines that it shows."""
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
    return found


def shows(expected: list[str], output: str) -> bool:
    """Whether lines are an output's, where ``...`` stands for any text."""
    text = "\n".join(expected)
    pattern = re.sub(r"\\\.\\\.\\\.", "(?s:.*)", re.escape(text))
    return re.fullmatch(pattern, "\n".join(line.rstrip() for line in output.splitlines())) is not None


def read(shell: subprocess.Popen[str], command: str) -> str:
    """Return the output of a command in the shell."""
    assert shell.stdout is not None
    # With its background processes: they hold the pipe open, and the shell leads their group.
    late = threading.Timer(MOST_SECONDS, os.killpg, (shell.pid, signal.SIGKILL))
    late.start()
    try:
        lines = []
        for line in iter(shell.stdout.readline, f"{END}\n"):
            assert line, f"{command}: not within {MOST_SECONDS:g} s; printed {lines}"
            lines.append(line)
        return "".join(lines)
    finally:
        late.cancel()


def left(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("FIRST_DAY") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.chaos
@pytest.mark.allow_leak("unix_sockets", reason="the shell's processes are killed if a step fails")
def test_a_first_day(tmp_path: Path, installed: Installed) -> None:
    port = str(free_port())
    text = (ROOT / "docs/first-day.md").read_text().replace("29461", port)
    folder = tmp_path / "user"
    folder.mkdir()
    (folder / "examples").symlink_to(installed.checkout / "examples")
    environment = {**installed.environment, "FIRST_DAY": port}
    shell = subprocess.Popen(
        ["bash"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        cwd=folder, env=environment, start_new_session=True,
    )  # fmt: skip
    assert shell.stdin is not None and shell.stdout is not None
    began = time.monotonic()
    try:
        for command, expected in steps(text):
            if f"$ {command}".startswith(INSTALL):
                continue
            shell.stdin.write(f"{command}\necho '{END}'\n")
            shell.stdin.flush()
            output = read(shell, command)
            print(f"{time.monotonic() - began:5.1f} s $ {command}\n{output}", end="", flush=True)
            if expected or "until" in command:
                assert shows(expected, output), f"{command}: expected\n{expected}\ngot\n{output}"
        shell.stdin.close()
        assert shell.wait(20) == 0
        until("the end of all processes", lambda: not left(port), 20)
    finally:
        for process in left(port):
            process.send_signal(signal.SIGKILL)
        shell.wait(20)
        shell.stdin.close()
        shell.stdout.close()
        for log in sorted(folder.glob("*.log")):
            print(f"==> {log.name}\n{log.read_text()[-3000:]}")
