"""Hygiene for every test: it must stop everything that it starts, and restore everything that it changes.

After each test six things are compared with before: environment variables, signal handlers, threads, processes,
listening sockets and UNIX socket files. A difference that remains after `GRACE_SECONDS` fails the test, is named, and
is removed, so that the next test starts clean. Mark an intentional leak:

    @pytest.mark.allow_leak("unix_sockets", reason="a SIGKILLed agent cannot remove its socket")
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    Snapshot = dict[Hashable, str]

GRACE_SECONDS = 10.0
"""Time for a leak to disappear after the test: a killed process to be reaped, a socket to close, a coordinator without
agents to exit, which takes three seconds on a machine that does nothing else.
"""

RUN_VARIABLE = "UNICRON_TEST_RUN"
"""Marks this test run in the environment of every process started from it, so that orphans are found as well."""

ALLOWED_ENVIRONMENT = {
    "PYTEST_CURRENT_TEST",  # pytest's own
    "KMP_INIT_AT_FORK",  # set by torch's OpenMP when it is first used
    "KMP_DUPLICATE_LIB_OK",
    "TORCHINDUCTOR_CACHE_DIR",  # set when torch._inductor is first imported
    "TRITON_CACHE_DIR",
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # set by Lightning when it first looks for accelerators
}
PUT_BACK_ENVIRONMENT = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")
"""Set by Lightning's ``seed_everything``, which a test may call; restored without failing it."""
ALLOWED_THREADS = (
    "pytest_timeout",  # the watchdog of the test itself
    "pydevd",  # debuggers
    "tqdm_monitor",  # one daemon per process, started by the first progress bar
)
LEAN = Path(__file__).with_name("lean")
"""Folder of a ``sitecustomize``, for all processes that tests start, but not for those of pytest-xdist."""
SINGLE = ("tests/system/", "tests/fsdp/")
"""Folders of tests that mostly take half a minute or more, and share no fixture of a module. Megatron's stay with their
modules, so that seldom two of them, with five workers each, run at a time.
"""
WAITING = "tests/system/"
"""Folder of tests that wait for more than half of their time; those of other folders are run beside them."""
STARTERS = frozenset({"subprocess", "Coordinator", "LocalCluster"})
"""Names that mark a module which starts processes: it has imported at least one."""
ALLOWED_PROCESSES = (
    "multiprocessing.resource_tracker",  # one per process, lives as long as it
    "multiprocessing.forkserver",
    "worlds/prepared.py",  # one per session: see `torchruns`
)


def pytest_configure(config: pytest.Config) -> None:
    """Mark the run and give it a temporary folder of its own, with a path short enough for UNIX sockets."""
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # tmp_path stays at pytest's usual place
    os.environ[RUN_VARIABLE] = uuid.uuid4().hex
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="unicron-tests-")
    os.environ["XDG_STATE_HOME"] = f"{tempfile.tempdir}/state"  # not the user's: tokens are made there
    os.environ["UNICRON_PREPARE"] = "0"  # most tests end before an agent's prepared process would have been used
    os.environ.pop("UNICRON_TOKEN", None)
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:  # in the background of a script: processes would inherit it
            _reset(number)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of modules that can start processes; let those that wait run beside others that compute."""
    for item in items:
        if isinstance(item, pytest.Function) and not STARTERS.isdisjoint(vars(item.module)):
            item.add_marker("processes")
    if hasattr(config, "workerinput"):  # modules are put together again by the scheduling
        items[:] = spread(items)


def spread(items: list[pytest.Item]) -> list[pytest.Item]:
    """Put the tests of `WAITING` at even distances among the others, which mostly compute."""
    waiting = [item for item in items if item.nodeid.startswith(WAITING)]
    scopes = list(dict.fromkeys(scope_of(item.nodeid) for item in items if not item.nodeid.startswith(WAITING)))
    places = {scope: float(place) for place, scope in enumerate(scopes)}
    places |= {item.nodeid: place * len(scopes) / len(waiting) for place, item in enumerate(waiting)}
    return sorted(items, key=lambda item: places[scope_of(item.nodeid)])


def scope_of(nodeid: str) -> str:
    """Return what is given to a worker of pytest-xdist as a whole: a test of `SINGLE`, or the module of another."""
    return nodeid if nodeid.startswith(SINGLE) else nodeid.rsplit("::", 1)[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadscope``, distribute the tests of `SINGLE` one by one; all others stay with their module."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    return Scheduling(config, log) if config.getoption("dist") == "loadscope" else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the time that `make quick` or `make test` has taken so far."""
    started = os.environ.get("MAKE_STARTED")
    if started is not None and not hasattr(terminalreporter.config, "workerinput"):
        terminalreporter.write_line(f"{time.time() - int(started):.0f} s since the start of make")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the run's temporary folder."""
    shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)


def environment() -> Snapshot:
    """Every variable with its value."""
    return {(name, value): name for name, value in os.environ.items() if name not in ALLOWED_ENVIRONMENT}


def signal_handlers() -> Snapshot:
    """What handles signals, but for Python's own handlers; a loader with worker processes sets that of SIGCHLD once."""
    own = (None, signal.SIG_DFL, signal.default_int_handler)
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals() - {signal.SIGCHLD}}
    return {each: f"handler of signal {each[0]}: {each[1]}" for each in handlers.items() if each[1] not in own}


def _reset(number: int) -> None:
    """Have Python handle a signal as at its start."""
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def threads() -> Snapshot:
    """Threads known to Python."""
    return {
        thread.ident: f"thread {thread.name!r}"
        for thread in threading.enumerate()
        if not thread.name.startswith(ALLOWED_THREADS) and type(thread).__name__ != "TMonitor"
    }


def processes() -> Snapshot:
    """Descendants of this process, and all others that carry this run's mark. Zombies count until they are reaped."""
    pids = {process.pid for process in psutil.Process().children(recursive=True)}
    pids |= {pid for pid in psutil.pids() if pid != os.getpid() and _is_marked(pid)}
    snapshot: Snapshot = {}
    for pid in pids:
        try:
            process = psutil.Process(pid)
            command = " ".join(process.cmdline())
            if not any(allowed in command for allowed in ALLOWED_PROCESSES):
                key = (process.pid, process.create_time())
                snapshot[key] = f"process {process.pid} ({process.status()}): {command}"
        except psutil.Error:
            continue
    return snapshot


def _is_marked(pid: int) -> bool:
    """Whether a process has this run's mark. psutil would take three times as long, before and after each test."""
    try:
        return f"{RUN_VARIABLE}={os.environ[RUN_VARIABLE]}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it ended meanwhile, or is another user's
        return False


def listening_sockets() -> Snapshot:
    """Return sockets on which this process listens, TCP and UNIX."""
    connections = psutil.Process().net_connections(kind="all")
    return {
        (item.fd, item.laddr): f"socket {item.laddr}"
        for item in connections
        if item.status == psutil.CONN_LISTEN or (item.family == socket.AF_UNIX and item.laddr)
    }


def unix_sockets() -> Snapshot:
    """UNIX socket files in the run's temporary folder, but for those of prepared processes, which serve many tests."""
    paths = Path(os.environ["TMPDIR"]).rglob("*")
    found = [path for path in paths if _is_socket(path) and not path.parent.name.startswith("prepared-")]
    return {str(path): f"socket file {path}" for path in found}


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.lstat().st_mode)
    except OSError:  # removed meanwhile
        return False


PROBES: dict[str, Callable[[], Snapshot]] = {
    "environment": environment,
    "signal_handlers": signal_handlers,
    "threads": threads,
    "processes": processes,
    "listening_sockets": listening_sockets,
    "unix_sockets": unix_sockets,
}


def leaks(before: dict[str, Snapshot], grace_seconds: float = GRACE_SECONDS) -> dict[str, Snapshot]:
    """Return what exists now and did not before, by kind, after waiting for it to disappear.

    Args:
        before: a snapshot of each kind to compare.
        grace_seconds: time to wait.
    """
    deadline = time.monotonic() + grace_seconds
    while True:
        new = {
            kind: {key: text for key, text in PROBES[kind]().items() if key not in old} for kind, old in before.items()
        }
        new = {kind: found for kind, found in new.items() if found}
        if not new or time.monotonic() > deadline:
            return new
        time.sleep(0.05)


def clean_up(leaked: dict[str, Snapshot]) -> None:
    """Remove leaked objects as far as possible, so that one leak fails one test."""
    for pid, _ in leaked.get("processes", {}):
        try:
            psutil.Process(pid).kill()
            os.waitpid(pid, 0)
        except (psutil.Error, ChildProcessError):
            continue
    for number, _ in leaked.get("signal_handlers", {}):
        _reset(number)
    for path in leaked.get("unix_sockets", {}):
        Path(str(path)).unlink(missing_ok=True)


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test if it leaks."""
    allowed = {kind for mark in request.node.iter_markers("allow_leak") for kind in mark.args}
    assert allowed <= PROBES.keys(), f"allow_leak knows {sorted(PROBES)}, not {sorted(allowed - PROBES.keys())}"
    variables = dict(os.environ)
    before = {kind: probe() for kind, probe in PROBES.items() if kind not in allowed}
    yield
    for name in PUT_BACK_ENVIRONMENT:
        _put_back(name, variables)
    removed = [name for name in variables if name not in os.environ and name not in ALLOWED_ENVIRONMENT]
    # Environment variables do not change by themselves: no waiting.
    found = leaks({kind: old for kind, old in before.items() if kind == "environment"}, grace_seconds=0)
    found |= leaks({kind: old for kind, old in before.items() if kind != "environment"})
    clean_up(found)
    for name in {*(name for name, _ in found.get("environment", {})), *removed}:
        _put_back(name, variables)
    lines = [text for texts in found.values() for text in texts.values()] + [f"{name} removed" for name in removed]
    if lines:
        pytest.fail("left behind:\n  " + "\n  ".join(lines), pytrace=False)


def _put_back(name: str, variables: dict[str, str]) -> None:
    """Restore an environment variable to its value in ``variables``, or remove it."""
    os.environ.pop(name, None)
    if name in variables:
        os.environ[name] = variables[name]


@pytest.fixture(scope="session", autouse=True)
def lean_processes() -> None:
    """Hide packages from processes that tests start: see `LEAN`."""
    others = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{LEAN}{os.pathsep}{others}" if others else str(LEAN)


@pytest.fixture(scope="session", autouse=True)
def torchruns(lean_processes: None) -> Iterator[None]:
    """End the processes from which clusters of tests have forked their agents and workers, if there are any."""
    yield
    if (module := sys.modules.get("worlds.torchruns")) is not None:
        module.close()


@pytest.fixture
def with_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processes that a test itself starts find matplotlib, but not those that they start."""
    monkeypatch.setenv("UNICRON_TEST_FIGURES", "1")


@pytest.fixture
def with_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes import torch's compiler at their start, as it is usual, and not when something is compiled."""
    monkeypatch.setenv("UNICRON_TEST_COMPILER", "1")


@pytest.fixture(scope="session", autouse=True)
def no_processes_left_at_the_end() -> Iterator[None]:
    """Check processes of module and session fixtures, which live longer than a test."""
    yield
    found = leaks({"processes": {}})
    clean_up(found)
    assert not found, f"left behind by the whole run: {list(found['processes'].values())}"
