"""Starts workers by forking the prepared process (`unicron_lightning.prepared`), in place of torchelastic's ``Popen``.

An ordinary start stays the rule for everything that a fork would change: another program than ``python -u SCRIPT.py``
or ``-m MODULE``, a script that sets variables before its imports, variables that libraries may have read at their
import, limits or signals that have changed, packages that were installed meanwhile, modules beside the script with the
name of an imported one. So it does if the prepared process is slow, has died or must not be forked. Each cause is
logged once.

**The situation** is the part of a process's state that it has from the one that starts it, besides its command,
environment and files. A forked worker has it from the prepared process, an ordinary one from the agent. Both are equal
as long as the agent's has not changed since it started the prepared process. The signals that an agent ignores do
change: torchelastic handles some that its shell, or `nohup`, has had it ignore. A forked worker is told which.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Final

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from unicron_lightning import environ
from unicron_lightning.prepared import becoming
from unicron_lightning.prepared.becoming import FORK, GO, LIGHTNING, LOOP, NO_ROOM, PADDING, PADDING_NAME

logger = logging.getLogger(__name__)


_FROM_STATUS: Final = ("Umask", "SigBlk", "Groups", "NoNewPrivs")


def inherited() -> dict[str, object]:
    """Return what a process that this one's main thread starts inherits, by name."""
    status = _status()
    folder = Path().stat()
    limits = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
    return {
        "working directory": (os.getcwd(), folder.st_dev, folder.st_ino),  # noqa: PTH109 - Path.cwd() is the same call
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in limits},
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        "processors": sorted(os.sched_getaffinity(0)),
        "oom_score_adj": Path("/proc/self/oom_score_adj").read_text(),
        **{name: status.get(name) for name in _FROM_STATUS},
    }


def ignored() -> list[int]:
    """Return the signals that this process ignores."""
    mask = int(_status()["SigIgn"][0], 16)
    return [number for number in range(1, mask.bit_length() + 1) if mask >> (number - 1) & 1]


def _status() -> dict[str, list[str]]:
    lines = (line.partition(":") for line in Path("/proc/self/status").read_text().splitlines())
    return {name: text.split() for name, _, text in lines}


def differing(one: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    """Return the names whose values differ, or that only one of both has."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


PREPARE_SECONDS: Final = 30.0
"""Longest wait for the imports of the prepared process; an ordinary worker would need the time for its own."""
_FORK_SECONDS: Final = 10.0
_PR_SET_CHILD_SUBREAPER: Final = 36
_REPORT_BYTES: Final = 1 << 17
_WAIT_STEP_SECONDS: Final = (0.001, 0.05)
PARENT: Final = Path(becoming.__file__).with_name("parent.py")

_OF_WORKERS: Final = frozenset(
    {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_WORLD_SIZE",
     "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCH_ELASTIC_WORKER_IDENTICAL", *environ.FROM_AGENT}
)  # fmt: skip
"""Variables of a single worker. `becoming` renews what imports read from them."""
_OF_WORKERS_PREFIX: Final = "TORCHELASTIC_"


class ForkedWorker:
    """A worker, as torchelastic handles a `subprocess.Popen`.

    Args:
        args: the worker's command.
        pid: its process, a child of this one.
    """

    def __init__(self, args: Sequence[str], pid: int) -> None:
        self.args, self.pid = args, pid
        self.returncode: int | None = None
        """Exit status, or minus the number of the signal that has ended it; None as long as it was not collected."""

    def poll(self) -> int | None:
        """Collect the exit status, if the process has ended."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # collected elsewhere, which `Popen` takes for a success
                self.returncode = 0
            else:
                if pid == self.pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end.

        Args:
            timeout: longest time in seconds; None: no limit.

        Raises:
            subprocess.TimeoutExpired: it has not ended in time.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        step, most = _WAIT_STEP_SECONDS
        while (code := self.poll()) is None:
            if deadline is not None and timeout is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(list(self.args), timeout)
            time.sleep(step)
            step = min(2 * step, most)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


PREPARED: Final[set[int]] = set()
"""Prepared processes of this one: children that are no workers."""


class _OrdinaryStart(Exception):
    """Why a worker is started in the ordinary way."""


class PreparedStarts:
    """Forks an agent's workers. Belongs to the main thread.

    Args:
        environment: what workers will inherit, apart from the variables of a single worker.
        set_by_script: returns the variables that the script is known to set before its imports.
        lightning: whether the script imports Lightning.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        set_by_script: Callable[[], Collection[str]] = tuple,
        *,
        lightning: bool = True,
    ) -> None:
        self._set_by_script = set_by_script
        self._imports = LIGHTNING if lightning else LOOP
        self._environment = {name: value for name, value in environment.items() if not _is_of_workers(name)}
        self._situation = inherited()
        self._imported: dict[str, str] | None = None
        self._installed: dict[str, int] = {}
        self._reasons: set[str] = set()
        self._usual: Callable[..., Any] | None = None
        self._link: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | ForkedWorker | None = None

    @property
    def pid(self) -> int | None:
        """The prepared process."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the prepared process and take the place of torchelastic's start of a process."""
        usual: Any = getattr(SubprocessHandler, "_popen", None)
        if usual is None or list(inspect.signature(usual).parameters) != ["self", "args", "env"]:
            self._log("this version of torch starts workers in another way")
            return
        if (reason := self._of_script()) is not None:
            self._log(reason)
            return
        self._process, self._link = self._begin()
        self._usual = usual
        PREPARED.add(self._process.pid)

        def popen(handler: Any, args: Sequence[str], env: Mapping[str, str]) -> Any:
            try:
                return self._fork(handler, args, env)
            except _OrdinaryStart as reason:
                self._log(str(reason))
                return usual(handler, args, env)

        SubprocessHandler._popen = popen  # type: ignore[method-assign, assignment]

    def _begin(self) -> tuple[subprocess.Popen[bytes] | ForkedWorker, socket.socket]:
        """Start the prepared process; return it and the agent's end of the link."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            words = [str(PARENT), str(theirs.fileno()), str(os.getpid()), self._imports, PADDING]
            command = [sys.executable, *becoming.OPTIONS, *words]
            environment = {PADDING_NAME: PADDING, **self._environment}
            process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()], start_new_session=True)
        return process, ours

    def close(self) -> None:
        """End the prepared process, and give torchelastic's start of a process back."""
        if self._usual is not None:
            SubprocessHandler._popen = self._usual  # type: ignore[method-assign]
            self._usual = None
        self._end_process()

    def _end_process(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            PREPARED.discard(self._process.pid)
            self._process = None

    def _log(self, reason: str) -> None:
        if reason not in self._reasons:
            self._reasons.add(reason)
            logger.warning("ordinary_start reason=%r", reason)

    def _fork(self, handler: Any, args: Sequence[str], env: Mapping[str, str]) -> ForkedWorker:
        began = time.monotonic()
        self._check_start(args, env)
        link = self._ready()
        self._check_imports(args)
        outputs = [1 if handler._stdout is None else handler._stdout.fileno(),
                   2 if handler._stderr is None else handler._stderr.fileno()]  # fmt: skip
        worker = self._forked(link, list(args), dict(env), outputs)
        logger.info("worker_forked pid=%d seconds=%.3f", worker.pid, time.monotonic() - began)
        return worker

    def _of_script(self) -> str | None:
        """Return why workers of this script are not forked."""
        names = sorted(self._set_by_script())
        return f"the script sets {', '.join(names)} before it imports torch or Lightning" if names else None

    def _check_start(self, args: Sequence[str], env: Mapping[str, str]) -> None:
        """Check what is known before the imports have ended."""
        if (reason := self._of_script()) is not None:
            self._end_process()
            raise _OrdinaryStart(reason)
        words = list(args[1 + len(becoming.OPTIONS) :])
        if list(args[: 1 + len(becoming.OPTIONS)]) != [sys.executable, *becoming.OPTIONS] or not words:
            raise _OrdinaryStart(f"the command does not begin with {sys.executable} {' '.join(becoming.OPTIONS)}")
        if not ((words[0] == "-m" and len(words) > 1) or (words[0].endswith(".py") and Path(words[0]).is_file())):
            raise _OrdinaryStart(f"{words[0]!r} is neither a file *.py nor -m MODULE")
        variables = {name: value for name, value in env.items() if not _is_of_workers(name)}
        if changed := differing(variables, self._environment):
            raise _OrdinaryStart(f"the worker's environment differs from the prepared process' in {', '.join(changed)}")
        if changed := differing(inherited(), self._situation):
            raise _OrdinaryStart(f"the agent has changed its {', '.join(changed)}")

    def _check_imports(self, args: Sequence[str]) -> None:
        """Check that the worker would import the same modules."""
        assert self._imported is not None
        if changed := [folder for folder, at in self._installed.items() if _changed_at(folder) != at]:
            raise _OrdinaryStart(f"packages were installed in {changed[0]} since the prepared process was started")
        folder = Path.cwd() if args[2] == "-m" else Path(args[2]).resolve().parent
        for entry in sorted(folder.iterdir()):
            if not (entry.suffix in (".py", ".pyc", ".so") or (entry / "__init__.py").exists()):
                continue
            at = self._imported.get(entry.name.partition(".")[0])
            if at is not None and Path(at).resolve() != folder.resolve():
                raise _OrdinaryStart(f"{entry} has the name of a module that is imported before the script runs")

    def _ready(self) -> socket.socket:
        """Wait until the imports have ended."""
        if self._link is None:
            raise _OrdinaryStart("the prepared process has ended")
        if self._imported is None:
            report = self._answer(self._link, PREPARE_SECONDS, "is not ready")
            found = json.loads(report)
            if found["problem"] is not None:
                self._end_process()
                raise _OrdinaryStart(f"the prepared process must not be forked: {found['problem']}")
            self._imported = found["imported"]
            installed = {each for each in found["imported"].values() if Path(each).name.endswith("-packages")}
            self._installed = {folder: _changed_at(folder) for folder in installed}
        return self._link

    def _answer(self, link: socket.socket, seconds: float, what: str) -> bytes:
        """Receive from the prepared process or a worker; give both up if nothing comes."""
        readable = wait([link], seconds)
        content = b""
        if readable:
            try:
                content = link.recv(_REPORT_BYTES)
            except ConnectionError:
                content = b""
        if not content:
            self._end_process()
            raise _OrdinaryStart(
                f"the prepared process {f'{what} after {seconds:g} s' if not readable else 'has died'}"
            )
        return content

    def _forked(self, link: socket.socket, args: list[str], env: dict[str, str], outputs: list[int]) -> ForkedWorker:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        file = os.memfd_create("worker")
        try:
            text = json.dumps({"command": args, "environment": env, "ignored": ignored()}).encode()
            with open(file, "wb", closefd=False) as request:
                request.write(text)
            _adopt_orphans(True)
            try:
                socket.send_fds(link, [FORK], [file, 0, *outputs, theirs.fileno()])
                theirs.close()
                answer = self._answer(ours, _FORK_SECONDS, "has forked no worker")
            except ConnectionError:
                self._end_process()
                raise _OrdinaryStart("the prepared process has died") from None
            finally:
                _adopt_orphans(False)
            if answer == NO_ROOM:
                raise _OrdinaryStart("the command or the environment is too long for a prepared process")
            worker = ForkedWorker(args, int(answer))
            ours.send(GO)
            return worker
        finally:
            os.close(file)
            theirs.close()
            ours.close()


def _adopt_orphans(on: bool) -> None:
    """Become the parent of processes below this one whose parent ends, or cease to."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


def _is_of_workers(name: str) -> bool:
    return name in _OF_WORKERS or name.startswith(_OF_WORKERS_PREFIX)


def _changed_at(folder: str) -> int:
    try:
        return Path(folder).stat().st_mtime_ns
    except OSError:
        return 0
