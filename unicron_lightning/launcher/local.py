"""A cluster on this machine for the duration of one sweep: a coordinator and one node's daemon."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from unicron_lightning import environ
from unicron_lightning.agent.options import parse_endpoint
from unicron_lightning.cli.client import Access
from unicron_lightning.credentials import Token, is_loopback
from unicron_lightning.errors import CoordinatorUnavailable

_START_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 30.0
_POLL_SECONDS: Final = 0.05


def nothing_listens(endpoint: str) -> bool:
    """Whether the endpoint is a loopback address that does not answer."""
    host, port = parse_endpoint(endpoint)
    if not is_loopback(host):
        return False
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return False
    except OSError:
        return True


@contextmanager
def local_cluster(slots: int, logs: Path) -> Iterator[tuple[str, Access]]:
    """Run a coordinator and a daemon; their outputs and the jobs' are in ``logs``.

    Yields:
        The endpoint, and access to it.

    Raises:
        CoordinatorUnavailable: the coordinator does not start.
    """
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        state_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="unicron-sweep-")))
        token = secrets.token_hex(32)
        coordinator = stack.enter_context(
            _process(
                ["unicron_lightning.coordinator", "coordinator.port=0", f"store.state_dir={state_dir}"],
                token,
                logs / "coordinator.log",
            )
        )
        endpoint = f"127.0.0.1:{_port(coordinator, state_dir / 'coordinator.json', logs / 'coordinator.log')}"
        # One node with a fixed name, because the name is in the paths of logs.
        arguments = ["agent", "--endpoint", endpoint, "--node", "local", "--slots", str(slots), "--logs", str(logs)]
        stack.enter_context(_process(["unicron_lightning.cli", *arguments], token, logs / "agent.log"))
        yield endpoint, Access(token=Token(secret=token, origin="this sweep"))


@contextmanager
def _process(command: list[str], token: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = {name: value for name, value in os.environ.items() if name not in environ.FROM_AGENT}
    environment[environ.TOKEN] = token
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "unicron_lightning.launcher.tied", str(os.getpid()), *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # a Ctrl-C is for the sweep, which stops them in order
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _port(process: subprocess.Popen[bytes], announcement: Path, log: Path) -> int:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if announcement.exists():
            return int(json.loads(announcement.read_text(encoding="utf-8"))["port"])
        time.sleep(_POLL_SECONDS)
    raise CoordinatorUnavailable(f"the sweep's own coordinator does not start; its log is {log}")
