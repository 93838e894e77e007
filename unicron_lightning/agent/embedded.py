"""Starts the embedded coordinator: a separate process that outlives the agent that started it.

Several agents may find at the same time that no process listens. A lock in the state folder lets one of them start the
coordinator while the others keep trying to connect. Across folders or hosts the bind of the port decides, and the loser
exits with status 0. A coordinator that is killed is restarted with the same state folder and continues from it. After
a failed start, e.g. because the disk is full, the next attempt follows a second later, then after twice the time, up
to half a minute.

A coordinator that is stopped (SIGSTOP, a debugger) keeps its port, and no failure is recovered meanwhile. An embedded
one is killed when an agent gets no answer from it, so that it can't resume beside its successor.

An operator's coordinator is neither killed nor replaced: its restart must find its port free. A registered agent knows
from `wire.Registered` which kind it is. An agent that has not registered yet, e.g. on a replaced node, reads it in the
state folder, where the record of an operator's coordinator remains unless it ended in order without unfinished tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import psutil  # type: ignore[import-untyped]

from unicron_lightning import environ
from unicron_lightning.agent.options import AgentOptions, bind_address
from unicron_lightning.credentials import is_loopback
from unicron_lightning.errors import CoordinatorUnavailable
from unicron_lightning.private_files import RECORD, make_private, open_private
from unicron_lightning.tls import AUTO, COORDINATOR_FILE, Trust

logger = logging.getLogger(__name__)

START_SECONDS: Final = 30.0
_POLL_SECONDS: Final = 0.05
FIRST_DELAY_SECONDS: Final = 1.0
LAST_DELAY_SECONDS: Final = 30.0
_LOG_NAME: Final = "coordinator.log"
_SHOWN_BYTES: Final = 2000
"""Bytes of the end of a log that an error quotes."""
_STOPPED: Final = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


class EmbeddedCoordinator:
    """Ensures that a coordinator runs at a local endpoint."""

    def __init__(self, options: AgentOptions) -> None:
        self._options = options
        self._processes: list[subprocess.Popen[bytes]] = []
        """Processes that this agent has started, the newest last; those before it were replaced."""
        self._starting = False
        """Whether no session has stood since the newest was started. One that answers is maybe about to fail: it
        takes the port before it reads its state."""
        self._foreign = False
        self._awaiting = False
        """Whether it was logged that an operator's coordinator is awaited."""
        self._delay = FIRST_DELAY_SECONDS
        self._not_before = 0.0
        """time.monotonic() of the next start."""

    def met(self, *, started_by_agent: bool) -> None:
        """Record that a coordinator runs; an operator's, or one that keeps its state elsewhere, is not this agent's."""
        self._delay, self._not_before, self._starting = FIRST_DELAY_SECONDS, 0.0, False
        self._foreign = not (started_by_agent and _locked(self._options.state_dir / "lock"))

    async def ensure(self) -> None:
        """Start the coordinator unless another agent is starting it, and wait until its port is open.

        Raises:
            CoordinatorUnavailable: it exited at once with an error; the message quotes the end of its log.
            OSError: it could not be started at all, e.g. the disk is full.
        """
        if self._foreign or time.monotonic() < self._not_before:
            return
        try:
            await self._start_unless_another_does()
        except (CoordinatorUnavailable, OSError):
            self._not_before = time.monotonic() + self._delay
            self._delay = min(2 * self._delay, LAST_DELAY_SECONDS)
            raise

    async def _start_unless_another_does(self) -> None:
        folder = self._options.state_dir
        make_private(folder)
        lock = open_private(folder / "starting.lock", os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not await self._answers() and not self._awaits_operator():
                await self._start()
        except BlockingIOError:
            return
        finally:
            os.close(lock)

    def _awaits_operator(self) -> bool:
        """Whether the state folder belongs to an operator's coordinator that is to be started again; say so once."""
        record = _record(self._options.state_dir)
        if record.get("started_by_agent") is not False:
            return False
        if not self._awaiting:
            self._awaiting = True
            logger.warning(
                "coordinator_awaited endpoint=%s: an operator started it, and its tasks were unfinished when it ended; "
                "expected `unicron coordinator` again, or that %s is deleted",
                self._options.endpoint,
                self._options.state_dir / RECORD,
            )
        return True

    def end_if_stopped(self) -> None:
        """Kill an unresponsive coordinator if it is an embedded one and its process is stopped."""
        if self._foreign:
            return
        process = _of_folder(self._options.state_dir)
        if process is None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() in _STOPPED:
                logger.warning(
                    "coordinator_replaced endpoint=%s pid=%d reason=stopped", self._options.endpoint, process.pid
                )
                process.kill()

    def reap(self) -> None:
        """Collect the exit statuses of coordinators that this agent started and that have ended."""
        kept = self._processes[-1:] if self._starting else []  # its status is still to be looked at
        self._processes = [process for process in self._processes if process in kept or process.poll() is None]

    def release(self) -> None:
        """Detach from the coordinator, which continues after this agent exits."""
        self.reap()
        for process in self._processes:
            process.returncode = 0  # keeps Popen's finaliser from warning of a process that is meant to continue
        self._processes = []

    async def _start(self) -> None:
        log = self._options.state_dir / _LOG_NAME
        if not self._starting:  # else: on a busy machine it is still on its way
            self._processes.append(_spawn(self._options, log))
            self._starting = True
            pid = self._processes[-1].pid
            logger.info("coordinator_started endpoint=%s pid=%d log=%s", self._options.endpoint, pid, log)
        process = self._processes[-1]
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            await asyncio.sleep(_POLL_SECONDS)
            status = process.poll()
            self._starting = status is None
            if status == 0 or await self._answers():
                return
            if status:
                raise CoordinatorUnavailable(
                    f"the embedded coordinator for {self._options.endpoint} ended with status {status}; "
                    f"the end of {log}:\n{_tail(log)}"
                )
        logger.warning("coordinator_start_slow endpoint=%s seconds=%g", self._options.endpoint, START_SECONDS)

    async def _answers(self) -> bool:
        try:
            _, writer = await asyncio.open_connection(self._options.coordinator_host, self._options.coordinator_port)
        except OSError:
            return False
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return True


def _locked(path: Path) -> bool:
    """Whether a coordinator holds the lock of its state folder."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _record(state_dir: Path) -> dict[str, Any]:
    """Return the description that the folder's last coordinator has left; empty if there is none."""
    try:
        record = json.loads((state_dir / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _of_folder(state_dir: Path) -> psutil.Process | None:
    """Return the coordinator recorded last in the folder, if it lives and belongs to this user."""
    try:
        process = psutil.Process(int(_record(state_dir)["pid"]))
        is_ours = process.uids().real == os.getuid() and f"store.state_dir={state_dir}" in process.cmdline()
    except (ValueError, KeyError, TypeError, psutil.Error):
        return None
    return process if is_ours else None


def _spawn(options: AgentOptions, log: Path) -> subprocess.Popen[bytes]:
    # Without the variables that mark a worker: the coordinator must not tie its life to this agent.
    environment = {name: value for name, value in os.environ.items() if name not in environ.FROM_AGENT}
    environment[environ.TOKEN] = options.access.token.secret
    command = [
        sys.executable,
        "-m",
        "unicron_lightning.coordinator",
        f"coordinator.host={bind_address(options.coordinator_host)}",
        f"coordinator.port={options.coordinator_port}",
        f"store.state_dir={options.state_dir}",
        "coordinator.started_by_agent=true",
        "coordinator.exit_when_idle=true",
        f"coordinator.allow_injection={str(options.allow_injection).lower()}",
        *_encryption(options.access.trust, options.coordinator_host),
    ]
    with open(log, "ab", opener=open_private) as output:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def _encryption(trust: Trust, host: str) -> list[str]:
    """The coordinator's options, such that this agent's trust accepts it.

    Raises:
        CoordinatorUnavailable: it would need a certificate that is not there.
    """
    if not trust.encrypted:
        return [] if is_loopback(host) else ["coordinator.plaintext=true"]
    certificate = AUTO
    if trust.fingerprint is not None:
        raise CoordinatorUnavailable(
            f"{trust.option}sha256:... names the certificate of a coordinator that you start: expected "
            f"{trust.option}auto, or an own `unicron coordinator` with it"
        )
    if trust.ca is not None:
        path = trust.ca.with_name(COORDINATOR_FILE)
        if not path.is_file():
            raise CoordinatorUnavailable(
                f"{trust.option}{trust.ca}: the embedded coordinator needs a certificate of this CA in {path} "
                f"(unicron certs {path.parent} --host {host}); or use {trust.option}auto, which needs no files"
            )
        certificate = str(path)
    words = [f"coordinator.tls={certificate}"]
    if trust.client is not None and trust.ca is not None:
        words.append(f"coordinator.tls_client_ca={trust.ca}")
    return words


def _tail(log: Path) -> str:
    with contextlib.suppress(OSError):
        return log.read_bytes()[-_SHOWN_BYTES:].decode(errors="replace").strip()
    return ""
