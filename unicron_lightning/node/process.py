"""One torchrun agent of a job: its command line and environment, its process, its logs, its end.

Each stream of a task comes through a named pipe into a file that belongs to the daemon alone. torchrun's own files
would grow for as long as a task trains. If the daemon dies, the contents of the pipe are lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Final

import psutil  # type: ignore[import-untyped]

from unicron_lightning import environ
from unicron_lightning.jobs import FROM_FILE, FROM_VARIABLE, Job, problem
from unicron_lightning.node.launch import DAEMON_PID, PIPES, pipe_name
from unicron_lightning.node.options import NodeOptions, log_folder
from unicron_lightning.node.reconcile import AgentState
from unicron_lightning.private_files import make_private, open_private, open_regular
from unicron_lightning.wire.daemon import Launch, NodeTask
from unicron_lightning.wire.fields import shortened

logger = logging.getLogger(__name__)


_CONNECT_SECONDS: Final = 900
_TOKEN_FILE: Final = "token"
_ACTIVATION_FILE: Final = "activate.sh"
_MOST_SECRET_BYTES: Final = 128 << 10


def hand_token(options: NodeOptions, scratch: Path) -> None:
    """Write the token to a file for torchrun alone: arguments are visible to all users, and workers inherit
    variables.
    """
    if "token_file" not in options.for_torchrun:
        path = scratch / _TOKEN_FILE
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
            file.write(options.access.token.secret)


def torchrun_command(launch: Launch, options: NodeOptions, scratch: Path) -> list[str]:
    """Return the arguments of the process, without the job's activation commands: see `activated`.

    Args:
        launch: the agent to run.
        options: the daemon's options.
        scratch: folder of this start, with the file of `hand_token`.

    Raises:
        ValueError: there is no such interpreter on this node.
    """
    job = launch.job
    conf = {"node": options.node, "slot": launch.slot, "weight": f"{job.weight!r}", "embedded": "false"}
    # The order to start has just arrived: an absent coordinator is being restarted.
    conf["connect_timeout"] = f"{_CONNECT_SECONDS}"
    conf["token_file"] = str(scratch / _TOKEN_FILE)
    if options.rack is not None:
        conf["rack"] = options.rack
    conf.update(options.for_torchrun)
    return [
        *(_interpreter(job), "-m", "unicron_lightning.node.launch"),
        *("--rdzv-backend", "unicron", "--rdzv-endpoint", options.endpoint, "--rdzv-id", job.name),
        *("--rdzv-conf", ",".join(f"{key}={value}" for key, value in conf.items())),
        *("--nnodes", f"{job.min_nodes}:{job.max_nodes}", "--nproc-per-node", str(job.workers_per_node)),
        *("--max-restarts", str(job.max_restarts)),
        *(("--local-addr", options.local_addr) if options.local_addr else ()),
        *job.command,
    ]


def activated(job: Job, command: Sequence[str], scratch: Path) -> list[str]:
    """Return arguments that run the job's activation commands in bash and then become ``command``, in one process.

    Args:
        job: the job; without activation commands ``command`` is returned unchanged.
        command: arguments of the process.
        scratch: folder of this start, which gets the shell's script: arguments are limited in length.
    """
    if not job.activate:
        return list(command)
    lines = []
    for each in job.activate:
        message = shlex.quote(f"unicron: activate: {each}: ended with status")
        lines.append(f'{{ {each}\n}} || {{ code=$?; echo {message} "$code" >&2; exit "$code"; }}')
    path = scratch / _ACTIVATION_FILE
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
        file.write("\n".join([*lines, f"exec {shlex.join(command)}", ""]))
    return ["bash", str(path)]


def torchrun_environment(
    launch: Launch, options: NodeOptions, pipes: Path, inherited: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the environment of the process: the daemon's, the job's, its secrets, and required values.

    Raises:
        ValueError: a secret cannot be read; the message names its source only.
    """
    job = launch.job
    environment = {name: value for name, value in inherited.items() if name not in environ.FROM_AGENT}
    environment.setdefault("PYTHONUNBUFFERED", "1")  # otherwise a log is pages behind
    if (home := _virtual_environment(job)) is not None:
        environment["VIRTUAL_ENV"] = str(home)
        environment["PATH"] = os.pathsep.join([str(home / "bin"), *filter(None, [environment.get("PATH")])])
    environment.update(job.environment)
    for name, source in job.secrets.items():
        environment[name] = _secret(name, source, inherited)
        if options.access.token.secret in environment[name]:
            raise ValueError(f"secrets.{name}={source}: it holds the token, which no job gets; expected another secret")
    devices = next(slot.devices for slot in options.slots if slot.label == launch.slot)
    if devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = devices
    environment.pop(environ.TOKEN, None)
    environment[DAEMON_PID], environment[PIPES] = str(os.getpid()), str(pipes)
    environment[environ.LOGS] = str(log_folder(options.logs, job.name, options.node, launch.slot).absolute())
    return environment


def _virtual_environment(job: Job) -> Path | None:
    """Return the folder that the job names as its Python; None if it names an interpreter, or none."""
    return Path(job.python) if job.python is not None and "/" in job.python and Path(job.python).is_dir() else None


def _interpreter(job: Job) -> str:
    if job.python is None or "/" not in job.python:
        return job.python or sys.executable
    home = _virtual_environment(job)
    path = Path(job.python) if home is None else home / "bin" / "python"
    if not os.access(path, os.X_OK):
        raise ValueError(f"python={job.python}: expected an interpreter or a virtual environment; {path} is none")
    return str(path)


def _secret(name: str, source: str, inherited: Mapping[str, str]) -> str:
    if source.startswith(FROM_VARIABLE):
        value = inherited.get(source.removeprefix(FROM_VARIABLE))
        if value is None:
            raise ValueError(f"secrets.{name}={source}: expected this variable in the daemon's environment")
        return value
    try:
        with open(source.removeprefix(FROM_FILE), "rb", opener=open_regular) as file:
            content = file.read(_MOST_SECRET_BYTES + 1)
        value = content.decode().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ValueError(f"secrets.{name}={source}: expected a readable text file: {reason}") from None
    if len(content) > _MOST_SECRET_BYTES or "\0" in value:
        raise ValueError(f"secrets.{name}={source}: expected up to {_MOST_SECRET_BYTES} bytes and no null character")
    return value


_CHUNK_BYTES: Final = 1 << 16


class RotatingFile:
    """A file that becomes ``NAME.1`` when it is full, and that ``NAME.2``, and so on; the oldest is dropped.

    Args:
        path: the file; its folder is created. It is appended to if it exists.
        size: bytes at which it is full. A chunk is never divided.
        number: files kept beside the current one.
    """

    def __init__(self, path: Path, size: int, number: int) -> None:
        self._path = path
        self._most = size
        self._number = number
        make_private(path.parent)
        self._file = _append(path)
        self._size = self._file.tell()

    def write(self, data: bytes) -> None:
        """Append; unwritable data, e.g. on a full disk, is dropped, since logging must not stop the task."""
        try:
            if self._size and self._size + len(data) > self._most:
                self._turn_over()
            self._file.write(data)
            self._size += len(data)
        except OSError as error:
            logger.debug("log_not_written path=%s error=%s", self._path, error)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _turn_over(self) -> None:
        names = [self._path, *(self._path.with_name(f"{self._path.name}.{n}") for n in range(1, self._number + 1))]
        self._file.close()
        for older, newer in zip(reversed(names), reversed(names[:-1]), strict=False):
            with contextlib.suppress(FileNotFoundError):
                newer.replace(older)
        if len(names) == 1:
            self._path.unlink(missing_ok=True)
        self._file = _append(self._path)
        self._size = 0


def _append(path: Path) -> FileIO:
    return FileIO(path, "ab", opener=open_private)


class LogPipe:
    """A named pipe whose other end is written to by any number of processes, one after the other.

    Args:
        path: path of the pipe.
        file: receives the data; closed with the pipe.
    """

    def __init__(self, path: Path, file: RotatingFile) -> None:
        self._path = path
        self._file = file
        os.mkfifo(path, 0o600)
        # Also open for writing: otherwise it is at its end whenever no process has it open.
        self._descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        asyncio.get_running_loop().add_reader(self._descriptor, self._read)

    def note(self, text: str) -> None:
        """Add a line of the daemon's own."""
        self._file.write(f"---- {text}\n".encode())

    def close(self) -> None:
        """Read the remaining data, and remove the pipe."""
        asyncio.get_running_loop().remove_reader(self._descriptor)
        while self._read():
            pass
        os.close(self._descriptor)
        self._path.unlink(missing_ok=True)
        self._file.close()

    def _read(self) -> bool:
        try:
            data = os.read(self._descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        self._file.write(data)
        return bool(data)


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
