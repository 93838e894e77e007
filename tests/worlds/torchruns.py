"""Processes that are forked by a prepared one (`worlds.prepared`), in place of ones that import for seconds."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, Final

from unicron_lightning import environ
from unicron_lightning.agent.workers.forked import ForkedWorker
from unicron_lightning.local_cluster.processes import MARK, Processes, until
from unicron_lightning.prepared.becoming import PADDING, PADDING_NAME
from unicron_lightning.private_files import open_private

HERE: Final = Path(__file__).parent
ENVIRONMENT: Final = {
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONPATH": str(HERE.parent),
    environ.PREPARE: "0",
}
"""Lightning's messages have the elements of sets, in the order of their hashes."""
TORCHRUN: Final = "torch.distributed.run"
READ_LATER: Final = frozenset({MARK, PADDING_NAME, "TMPDIR", "COORDINATOR_FILE", "PYTEST_CURRENT_TEST",
                               "PYTHONFAULTHANDLER", "PYTHONPATH", "XDG_STATE_HOME"})  # fmt: skip
"""Variables that no import reads, and that a forked process has all the same."""
SECONDS: Final = 180.0
"""Most time in which a prepared process has imported everything, on a busy machine."""


def stub_of(path: Path) -> list[str]:
    """Return the first words of the command of a stub (`worlds.stub`) for a socket of a prepared process."""
    return [sys.executable, "-I", "-S", str(HERE / "stub.py"), str(path)]


@contextmanager
def prepared(out: Path, *modules: str, environment: Mapping[str, str] = ENVIRONMENT) -> Iterator[Path]:
    """Start the process that forks others, in which modules are imported; yield its socket."""
    with ExitStack() as stack:
        short = Path(tempfile.mkdtemp(prefix="prepared-"))  # UNIX sockets have short paths
        stack.callback(shutil.rmtree, short, ignore_errors=True)
        started = Processes(out / "prepared", {**environment, PADDING_NAME: PADDING})
        stack.callback(started.stop, 0.0)
        path = short / "socket"
        command = [sys.executable, "-u", HERE / "prepared.py", str(os.getpid()), path, *modules, PADDING]
        started.start("prepared", command)
        until(f"the prepared process; its log is in {started.folder}", path.exists, SECONDS)
        yield path


class ForkedProcess(ForkedWorker):
    """A forked process, which is a child of the prepared one.

    Args:
        path: of the prepared process' socket.
        words: its request.
        environment: of the process.
        folder: its working directory.
        output: gets its output.
    """

    def __init__(self, path: Path, words: Sequence[str], environment: Mapping[str, str], folder: str, output: int):
        self._link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.connect(str(path))
        request = {"words": list(words), "environment": dict(environment), "folder": folder}
        socket.send_fds(self._link, [json.dumps(request).encode()], [output, output])
        super().__init__(words, int(self._link.recv(100)))
        self._link.setblocking(False)

    def poll(self) -> int | None:
        """Return the exit status that the prepared process has reported; None: it has not ended."""
        if self.returncode is None:
            try:
                content = self._link.recv(100)
            except BlockingIOError:
                return None
            self._link.close()
            self.returncode = int(content or -signal.SIGKILL)  # nothing: the prepared process has died
        return self.returncode


class Torchruns:
    """Starts torchrun: forks it and its workers, unless they are to import in another environment.

    Args:
        folder: of the prepared processes, each of which is started with the first torchrun that needs it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._stack = folder, ExitStack()
        self._paths: dict[tuple[str, ...], Path] = {}
        self._environment = _at_import({**os.environ, "OMP_NUM_THREADS": "1"})

    def start(self, words: Sequence[str], environment: Mapping[str, str], folder: Path, output: IO[Any]) -> Any:
        """Start it; return its process, or None if it must be started in the ordinary way."""
        if _at_import(environment) != self._environment:
            return None
        own = {**environment, environ.PREPARE: "1"}
        return ForkedProcess(self._path(words), ["torchrun", *words], own, str(folder), output.fileno())

    def _path(self, words: Sequence[str]) -> Path:
        """Return the socket of the prepared process for a script: that of Megatron's patch torch when they import."""
        modules = ("worlds.with_megatron",) if any("megatron" in Path(word).parts for word in words) else ()
        if modules not in self._paths:
            paths = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
            environment = {**self._environment, "PYTHONPATH": paths}
            started = prepared(self._folder / f"{len(self._paths)}", *modules, environment=environment)
            self._paths[modules] = self._stack.enter_context(started)
        return self._paths[modules]

    def close(self) -> None:
        """End the prepared processes, and with them all others."""
        self._stack.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _at_import(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that an import may read."""
    later = {name for name in environment if name.startswith("UNICRON_") and not name.startswith("UNICRON_TEST_")}
    return {name: value for name, value in environment.items() if name not in READ_LATER | later}


_of_session: list[Torchruns] = []
"""At most one."""


def close() -> None:
    """End what this session has prepared."""
    while _of_session:
        _of_session.pop().close()


def _forked(words: Sequence[str], environment: Mapping[str, str], folder: Path, output: IO[Any]) -> Any:
    """Start torchrun; return its process, or None if it must be started in the ordinary way."""
    if os.environ.get("UNICRON_TEST_FORKS") == "0":
        return None
    if not _of_session:
        _of_session.append(Torchruns(Path(tempfile.mkdtemp(prefix="torchruns-"))))
        atexit.register(close)
    return _of_session[0].start(words, environment, folder, output)


def start_torchrun(words: Sequence[str], environment: Mapping[str, str], folder: Path, output: IO[Any]) -> Any:
    """Start torchrun, forked if possible; return its process."""
    process = _forked(words, environment, folder, output)
    if process is None:
        command = [sys.executable, "-m", TORCHRUN, *words]
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)
    return process


class ForkingProcesses(Processes):
    """Forks those processes that are torchrun."""

    def start(self, name: str, command: Sequence[str | Path], **environment: str) -> subprocess.Popen[bytes]:
        words = [str(word) for word in command]
        variables = {**self.environment, **environment}
        if TORCHRUN in words[:5]:
            with open(self.log(name), "ab", opener=open_private) as output:
                arguments = words[words.index(TORCHRUN) + 1 :]
                process = _forked(arguments, variables, self._directory or Path.cwd(), output)
            if process is not None:
                return self._has_started(name, process)
        return super().start(name, command, **environment)
