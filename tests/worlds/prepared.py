"""A process that has imported everything, and forks agents and workers: ``prepared.py PARENT-PID SOCKET [MODULE]...``.

A stub's first word is ``agent``, for torchrun, or a module of the tests with a function ``main(FOLDER, NAME)``.
MODULEs are imported, too.

The imports of an agent and a worker take seconds of a core, a scenario a tenth of one. A process that is needed is
therefore started as a `stub`, which connects here and gets a forked process for itself: with its environment, folder
and output, in a session of its own. One whose stub has ended is killed. All end with this process, and it with its
parent.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
import torch.distributed.run
from conformance.table import scenarios
from lightning.fabric.utilities import rank_zero

import unicron_lightning.agent.handler
import unicron_lightning.strategies.unicron  # noqa: F401
from unicron_lightning import autoload
from unicron_lightning.parent_death import tie_to

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
    os.environ.clear()
    os.environ.update(request["environment"])  # type: ignore[call-overload]
    os.chdir(str(request["folder"]))
    tempfile.tempdir = None
    rank_zero.rank_zero_only.rank = int(os.environ.get("RANK", "0"))
    autoload.install()


def main() -> None:
    if not tie_to(int(sys.argv[1]), signal.SIGKILL):
        sys.exit(1)
    torch.set_num_threads(1)
    scenarios()
    for module in sys.argv[3:]:
        importlib.import_module(module)
    gc.freeze()
    kind, *words = ForkServer(Path(sys.argv[2])).serve()
    sys.argv[1:] = words
    if kind == "agent":
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
