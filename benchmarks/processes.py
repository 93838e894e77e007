"""Processes of a run, started in a folder of their own and all stopped at its end."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_FIRST_PORT, _LAST_PORT, _BLOCK = 20_000, 32_000, 16


def free_port() -> int:
    """Find a port with free ports above it, below the ephemeral range; some systems use the next ports, too."""
    while True:
        first = random.randrange(_FIRST_PORT, _LAST_PORT)
        try:
            for port in range(first, first + _BLOCK):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first


def started_at(pid: int) -> float:
    """Start time of a process by this process's clock (``time.time()``), to 10 ms.

    psutil's `create_time` adds the process's age to the kernel's boot time, which is off by up to a second after the
    clock has been set.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)


class Processes:
    """Starts processes whose working directory is ``folder``; `stop` ends whatever still runs there.

    Only processes started here are signalled: a process in this folder is one of them or a descendant.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        folder.mkdir(parents=True)
        self.folder = folder.resolve()
        self._environment = {**os.environ, **environment}
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: Sequence[str | Path], **environment: str) -> subprocess.Popen[bytes]:
        """Start a process; its output goes to ``<name>.log``."""
        with (self.folder / f"{name}.log").open("ab") as output:
            process = subprocess.Popen(
                [str(word) for word in command],
                env={**self._environment, **environment},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.started[name] = process
        return process

    def stop(self) -> None:
        """Send SIGTERM to all processes, and SIGKILL to the remaining ones after three seconds."""
        for process in self.started.values():
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + 3.0
        while self._running() and time.monotonic() < deadline:
            for process in self.started.values():
                process.poll()
            time.sleep(0.05)
        for pid in self._running():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for process in self.started.values():
            process.wait(10)

    def _running(self) -> list[int]:
        pids = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                inside = os.readlink(entry / "cwd") == str(self.folder)
            except OSError:
                continue
            if inside:
                pids.append(int(entry.name))
        return pids
