"""A process that has imported everything, and forks others: ``prepared.py PARENT-PID SOCKET [MODULE]... PADDING``.

The first word of a request is ``agent``, for torchrun, ``torchrun``, for one whose workers are forked, too, or a module
of the tests with a function ``main(FOLDER, NAME)``. MODULEs are imported, too; one may have a function ``prepare``.

The imports of an agent and a worker take seconds of a core, a scenario a tenth of one. A process that is needed is
therefore asked for by a `stub`, or by `torchruns`, which connect here and get a forked process: with their environment,
folder and output, in a session of its own. One whose connection is closed is killed. All end with this process, and it
with its parent. A ``torchrun`` begins with a prepared process of its own, which is forked from it while it has one
thread; from there on agent and workers do what they do in use (`unicron_lightning.agent.workers.forked`).
"""

from __future__ import annotations

import sys

if sys.path and __file__.startswith(f"{sys.path[0]}/"):
    del sys.path[0]  # the folder of this file: no folder of a script is on the path while libraries are imported

import atexit
import contextlib
import faulthandler
import importlib
import json
import os
import selectors
import signal
import socket
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch
import torch.distributed.run
from lightning.fabric.utilities import rank_zero

import unicron_lightning.strategies.unicron  # noqa: F401
from unicron_lightning import autoload
from unicron_lightning.agent.agent import AgentThread
from unicron_lightning.agent.handler import UnicronRendezvousHandler
from unicron_lightning.agent.workers.forked import ForkedWorker, PreparedStarts
from unicron_lightning.parent_death import tie_to
from unicron_lightning.prepared import becoming, parent

TORCHRUN: Final = ("agent", "torchrun")
_REQUEST_BYTES: Final = 1 << 18


class ForkServer:
    """Forks a process for each stub.

    Args:
        path: of the socket on which it listens.
    """

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"{path}.part")
        self._listener.listen(64)
        path.with_name(f"{path.name}.part").rename(path)  # it can be connected to as soon as it exists
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._stubs: dict[int, tuple[socket.socket, int]] = {}
        """The connection of its stub and its pidfd, of each process that has not been reaped."""

    def serve(self) -> list[str]:
        """Serve; return in each forked process, with the words of its command. A stub may be killed at any time."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    if (words := self._fork()) is not None:
                        return words
                elif isinstance(key.fileobj, int):
                    self._reap(key.data)
                elif key.data in self._stubs:  # else it was reaped in this turn
                    self._selector.unregister(key.fileobj)
                    os.kill(key.data, signal.SIGKILL)

    def _fork(self) -> list[str] | None:
        stub, _ = self._listener.accept()
        content, outputs, _, _ = socket.recv_fds(stub, _REQUEST_BYTES, 2)
        if not content:
            stub.close()
            return None
        request, parent = json.loads(content), os.getpid()
        pid = os.fork()
        if pid == 0:
            stub.close()
            self._close()
            _become(request, outputs, parent)
            return list(request["words"])
        for each in outputs:
            os.close(each)
        _tell(stub, pid)
        pidfd = os.pidfd_open(pid)
        self._stubs[pid] = stub, pidfd
        self._selector.register(stub, selectors.EVENT_READ, pid)
        self._selector.register(pidfd, selectors.EVENT_READ, pid)
        return None

    def _reap(self, pid: int) -> None:
        stub, pidfd = self._stubs.pop(pid)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self._selector.unregister(pidfd)
        os.close(pidfd)
        if stub in self._selector.get_map():
            self._selector.unregister(stub)
            _tell(stub, code)
        stub.close()

    def _close(self) -> None:
        self._selector.close()
        self._listener.close()
        for stub, pidfd in self._stubs.values():
            stub.close()
            os.close(pidfd)


def _tell(stub: socket.socket, number: int) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stub.send(str(number).encode(), socket.MSG_NOSIGNAL)


def _become(request: dict[str, object], outputs: list[int], parent: int) -> None:
    """Take over what a started process has from its start, and what imports have read from it."""
    os.setsid()
    if not tie_to(parent, signal.SIGKILL):
        os._exit(1)
    for place, each in enumerate(outputs, 1):
        os.dup2(each, place)
        os.close(each)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(request["environment"])  # type: ignore[call-overload]
    wanted = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [*wanted, *(each for each in sys.path if each not in paths)]
    kind, *words = request["words"]  # type: ignore[misc]
    if kind == "torchrun":  # a worker behind a stub is no child of its agent, which must not take it for one
        becoming.show([sys.executable, *becoming.OPTIONS, "-m", "torch.distributed.run", *words], os.environ)
    if "PYTHONFAULTHANDLER" in os.environ:
        faulthandler.enable()
    os.chdir(str(request["folder"]))
    tempfile.tempdir = None
    rank_zero.rank_zero_only.rank = int(os.environ.get("RANK", "0"))
    autoload.install()


def _fork_workers_from_here(report: bytes, changes: Mapping[str, str | None]) -> None:
    """Have this agent, which has one thread, fork its workers from a process that is forked from it now.

    Returns in the agent, and in each worker when its program has ended.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    agent = os.getpid()
    pid = os.fork()
    if pid == 0:
        ours.close()
        os.setsid()
        if not tie_to(agent, signal.SIGKILL):
            os._exit(1)
        becoming.show([sys.executable, *becoming.OPTIONS, str(parent.__file__)], os.environ)
        theirs.send(report)
        parent.work(theirs, agent, changes)
        sys.exit()  # a worker ends as it does in use
    theirs.close()
    prepared = ForkedWorker([str(parent.__file__)], pid)
    usual = UnicronRendezvousHandler._prepare_environment

    def prepare_environment(self: UnicronRendezvousHandler, agent: AgentThread, number: int) -> None:
        """Fork the first workers, too, which cannot report what their scripts set before they import."""
        usual(self, agent, number)
        if self._options.prepare and self._prepared is None:
            self._prepare(agent)

    PreparedStarts._begin = lambda self: (prepared, ours)  # type: ignore[method-assign]
    UnicronRendezvousHandler._prepare_environment = prepare_environment  # type: ignore[method-assign]


def _imports() -> None:
    torch.set_num_threads(1)
    parent.prepare()
    for name in sys.argv[3:]:
        getattr(importlib.import_module(name), "prepare", lambda: None)()


def main() -> None:
    if not tie_to(int(sys.argv[1]), signal.SIGKILL):
        sys.exit(1)
    del sys.argv[-1]  # room for what is shown of forked processes
    becoming.move_environment()
    becoming.show(["prepared", *sys.argv], os.environ)
    report, changes = parent.prepared(_imports)
    kind, *words = ForkServer(Path(sys.argv[2])).serve()
    sys.argv[1:] = words
    if kind == "torchrun":
        _fork_workers_from_here(report, changes)
    if kind in TORCHRUN:
        os._exit(_ended(lambda: torch.distributed.run.main(words)))
    os._exit(_ended(lambda: importlib.import_module(kind).main(Path(words[0]), words[1])))


def _ended(main: Callable[[], None]) -> int:
    """Run a forked process; return its exit status. Its memory is not freed: this would copy all of its parent's."""
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        code = 130
    except BaseException:  # noqa: BLE001 - as the interpreter does at its end
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    main()
