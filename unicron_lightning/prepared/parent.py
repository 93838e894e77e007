"""The prepared process: ``python -u parent.py LINK AGENT-PID IMPORTS PADDING``. It imports, reports, and forks workers.

LINK is a socket of the agent, IMPORTS `becoming.LIGHTNING` or `becoming.LOOP`. Each request has a file with the
worker's command and environment, the worker's three standard files and a socket, over which the worker reports its
process number and gets leave to begin. The worker is forked twice: its parent is gone at once, so that the agent, a
subreaper meanwhile, becomes its parent.

The process has one thread, has touched no accelerator and no network, and ends with its agent.
"""

import sys

if sys.path and __file__.startswith(f"{sys.path[0]}/"):
    del sys.path[0]  # the folder of this file: no folder of a script is on the path while libraries are imported

import gc
import importlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from unicron_lightning.parent_death import tie_to
from unicron_lightning.prepared import becoming
from unicron_lightning.prepared.becoming import FILES, FORK, GO, NO_ROOM

_IMPORTS: Final = {
    becoming.LIGHTNING: ("lightning.pytorch", "torch", "unicron_lightning.strategies.unicron"),
    becoming.LOOP: ("torch", "torch._dynamo", "unicron_lightning.loop.run"),
}
"""Modules by kind of workers. The first optimizer of a process imports ``torch._dynamo``."""
_ADOPTION_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.0005


class Program(NamedTuple):
    """What a forked process runs."""

    command: list[str]
    environment: dict[str, str]
    ignored: list[int]
    link: socket.socket


def prepare(kind: str = becoming.LIGHTNING) -> None:
    """Import what workers of a kind import."""
    for name in _IMPORTS[kind]:
        importlib.import_module(name)


def imported() -> dict[str, str]:
    """Return the folder in which each top-level module was found."""
    found: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if "." not in name and isinstance(path, str):
            place = Path(path)
            found[name] = str(place.parents[1] if place.name.startswith("__init__.") else place.parent)
    return found


def problem() -> str | None:
    """Return why this process must not fork workers; found out by a child, since some libraries stop threads then."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        import torch

        bad = getattr(torch._C, "_cuda_isInBadFork", lambda: False)()
        os.write(writer, b"1" if bad else b"0")
        os._exit(0)
    bad = os.read(reader, 1) != b"0"
    os.waitpid(pid, 0)
    os.close(reader)
    os.close(writer)
    links = [Path("/proc/self/fd") / each for each in os.listdir("/proc/self/fd")]
    files = {str(link.readlink()) for link in links if link.is_symlink()}
    devices = sorted(each for each in files if each.startswith("/dev/nvidia"))
    if bad or devices:
        return f"an import has initialized the accelerator {' '.join(devices)}".rstrip()
    if (threads := len(os.listdir("/proc/self/task"))) != 1:
        return f"imports have started {threads - 1} threads"
    return None


def serve(link: socket.socket, agent: int) -> Program:
    """Answer requests; return in each worker. The process ends with the agent's end of the link."""
    while True:
        content, files, _, _ = socket.recv_fds(link, len(FORK), FILES)
        if not content:
            os._exit(0)
        between = os.fork()
        if between == 0:
            _fork_worker(files)
            link.close()
            return _adopted(files, agent)
        os.waitpid(between, 0)
        for each in files:
            os.close(each)


def _fork_worker(files: list[int]) -> None:
    """Fork the worker and end; return in the worker. What the system shows is right before the agent can see it."""
    request = _request(files[0])
    if not becoming.show(request["command"], request["environment"]):
        socket.socket(fileno=files[-1]).send(NO_ROOM)
        os._exit(1)
    if os.fork() != 0:
        os._exit(0)


def _request(file: int) -> Any:
    with open(file, encoding="utf-8", closefd=False) as text:
        text.seek(0)
        return json.load(text)


def _adopted(files: list[int], agent: int) -> Program:
    """Wait until the agent is this process' parent and lets it begin; exit otherwise."""
    deadline = time.monotonic() + _ADOPTION_SECONDS
    while os.getppid() != agent:  # to be tied before that is to end with the process in between
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(_POLL_SECONDS)
    if not tie_to(agent, signal.SIGKILL):
        os._exit(1)
    os.setsid()
    request = _request(files[0])
    link = socket.socket(fileno=files[-1])
    for place, each in enumerate(files[1:4]):
        os.dup2(each, place)
    for each in files[:4]:
        os.close(each)
    try:
        link.send(str(os.getpid()).encode())
        if link.recv(len(GO)) != GO:
            os._exit(1)
    except OSError:
        os._exit(1)
    return Program(**request, link=link)


def prepared(imports: Callable[[], None]) -> tuple[bytes, dict[str, str | None]]:
    """Import what workers import.

    Returns:
        The report for agents, and what imports have changed in the environment; None: they have removed it.
    """
    before = dict(os.environ)
    imports()
    after = dict(os.environ)
    changes = {name: after.get(name) for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    gc.collect()
    gc.freeze()
    return json.dumps({"problem": problem(), "imported": imported()}).encode(), changes


def work(link: socket.socket, agent: int, changes: Mapping[str, str | None]) -> None:
    """Serve an agent, and run a worker's program in each process that was forked."""
    worker = serve(link, agent)
    worker.link.close()
    becoming.ignore(worker.ignored)
    becoming.become(worker.command, worker.environment, changes)
    becoming.run(worker.command)


def main() -> None:
    """Prepare, and serve."""
    link, agent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    if not tie_to(agent, signal.SIGKILL):
        sys.exit(1)
    becoming.move_environment()
    becoming.show([sys.executable, *becoming.OPTIONS, __file__], os.environ)
    report, changes = prepared(partial(prepare, sys.argv[3]))
    link.send(report)
    work(link, agent, changes)


if __name__ == "__main__":
    main()
