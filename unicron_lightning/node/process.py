"""One torchrun agent of a job: its process, its log pipes, its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from unicron_lightning.jobs import problem
from unicron_lightning.node.command import activated, hand_token, torchrun_command, torchrun_environment
from unicron_lightning.node.launch import pipe_name
from unicron_lightning.node.logs import LogPipe, RotatingFile
from unicron_lightning.node.options import NodeOptions, log_folder
from unicron_lightning.node.reconcile import AgentState
from unicron_lightning.wire.daemon import Launch, NodeTask
from unicron_lightning.wire.fields import shortened

logger = logging.getLogger(__name__)

CANT_START: int = 127
"""Exit code of an agent that could not be started, as a shell would report it."""


class AgentProcess:
    """A torchrun agent over its restarts. Lives in the daemon's event loop.

    Args:
        launch: the agent to run.
        options: the daemon's options.
        on_exit: called after each end.
    """

    def __init__(self, launch: Launch, options: NodeOptions, on_exit: Callable[[], None]) -> None:
        self.launch = launch
        self._options = options
        self._on_exit = on_exit
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._scratch: Path | None = None
        self._pipes: list[LogPipe] = []
        self._timer: asyncio.TimerHandle | None = None
        self._terminated = False
        self._below: list[psutil.Process] = []
        self._starts = 0
        self._reason = ""
        self._state = AgentState(running=False)

    @property
    def state(self) -> AgentState:
        """Its state for `reconcile.steps`."""
        return self._state

    @property
    def report(self) -> NodeTask:
        """Its state for the coordinator."""
        pid = self._process.pid if self._process is not None else None
        return NodeTask(
            job=self.launch.job,
            slot=self.launch.slot,
            pid=pid,
            starts=self._starts,
            code=self._state.code,
            reason=self._reason,
        )

    def start(self) -> None:
        """Start it; if that fails, it has ended immediately."""
        self._starts += 1
        self._reason = ""
        try:
            if (wrong := problem(self.launch.job) or self._wrong_slot()) is not None:
                raise ValueError(wrong)
            self._open_logs()
            self._spawn()
        except (OSError, ValueError, MemoryError, subprocess.SubprocessError) as error:
            # If the daemon can't start a job, only that job fails; its other agents continue.
            self._reason = f"can't be started: {type(error).__name__}: {shortened(str(error), 600)}"
            name = shortened(self.launch.job.name)
            logger.error("launch_failed task=%s slot=%s reason=%s", name, shortened(self.launch.slot), self._reason)
            self._put_away()
            self._ended(CANT_START, self._reason)

    def _wrong_slot(self) -> str | None:
        labels = [slot.label for slot in self._options.slots]
        return None if self.launch.slot in labels else f"slot={shortened(self.launch.slot)}: expected one of {labels}"

    def _put_away(self) -> None:
        """Kill a process that was started and can't be watched."""
        if self._process is not None:
            self.kill()
            self._process.wait()
            if self._pidfd >= 0:
                os.close(self._pidfd)
        self._pidfd = -1

    def stop(self, patience_seconds: float) -> None:
        """Let it end by itself for some time, then send SIGTERM, and later kill the remaining processes.

        A SIGTERM during its own clean-up would interrupt that.
        """
        if self._process is None or self._terminated:
            return
        self._state = AgentState(running=True, stopping=True)
        self._set_timer(patience_seconds, self._terminate)

    def _terminate(self) -> None:
        assert self._process is not None
        self._terminated = True
        self._below = self._descendants()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        self._set_timer(self._options.stop_seconds, self.kill)

    def _set_timer(self, seconds: float, then: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, then)

    def kill(self) -> None:
        """Send SIGKILL to all its processes now."""
        if self._process is not None:
            self._below = [*self._below, *self._descendants()]
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _open_logs(self) -> None:
        options, job = self._options, self.launch.job
        folder = log_folder(options.logs, job.name, options.node, self.launch.slot)
        self._scratch = Path(tempfile.mkdtemp(prefix="unicron-"))
        for name in ("agent", *(pipe_name(rank) for rank in range(job.workers_per_node))):
            file = RotatingFile(folder / f"{name}.log", options.log_bytes, options.log_files)
            self._pipes.append(LogPipe(self._scratch / name, file))

    def _spawn(self) -> None:
        assert self._scratch is not None
        hand_token(self._options, self._scratch)
        command = torchrun_command(self.launch, self._options, self._scratch)
        command = activated(self.launch.job, command, self._scratch)
        with (self._scratch / "agent").open("wb", buffering=0) as output:
            self._process = subprocess.Popen(
                command,
                env=torchrun_environment(self.launch, self._options, self._scratch),
                cwd=self.launch.job.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # its group receives the signals; a terminal's Ctrl-C goes to the daemon
            )
        self._state = AgentState(running=True)
        self._pidfd = os.pidfd_open(self._process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._exited)
        self._note(f"started as process {self._process.pid}, start {self._starts}")
        logger.info("agent_started task=%s slot=%s pid=%d starts=%d", self.launch.job.name, self.launch.slot,
                    self._process.pid, self._starts)  # fmt: skip

    def _exited(self) -> None:
        assert self._process is not None
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        # Its own child processes, if it was killed before it could stop them.
        for process in self._below:
            with contextlib.suppress(psutil.Error):
                process.kill()
        code = self._process.wait()
        how = f"signal {-code}" if code < 0 else f"status {code}"
        self._ended(code, f"ended with {how}{' as ordered' if self._state.stopping else ''}")

    def _ended(self, code: int, words: str) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._note(words)
        task, slot = shortened(self.launch.job.name), shortened(self.launch.slot)
        logger.info("agent_ended task=%s slot=%s code=%d", task, slot, code)
        for pipe in self._pipes:
            pipe.close()
        self._pipes = []
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
        self._process, self._below, self._scratch, self._terminated = None, [], None, False
        self._state = AgentState(running=False, stopping=self._state.stopping, code=code, ended_at=time.monotonic())
        self._on_exit()

    def _note(self, words: str) -> None:
        if self._pipes:
            self._pipes[0].note(f"{time.strftime('%Y-%m-%d %H:%M:%S')} torchrun {words}")

    def _descendants(self) -> list[psutil.Process]:
        assert self._process is not None
        with contextlib.suppress(psutil.Error):
            return list(psutil.Process(self._process.pid).children(recursive=True))
        return []
