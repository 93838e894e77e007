"""Makes a forked process what an ordinary start of ``python -u SCRIPT ARGUMENTS`` or ``-m MODULE`` would have made.

Of what a process inherits from its parent only ignored signals are handled here: the rest is equal, or the agent does
not ask for a fork (`agent.workers.forked`).

**Messages** between an agent, its prepared process and a forked worker pass over sockets without names.

**Command line and environment** are those that the system shows, in ``/proc/PID/cmdline`` and ``environ``. The kernel
reads both from the memory that it filled when the program was started. The agent identifies its workers by them, and
users find processes by them, so a forked worker writes its own there. The prepared process is started with `PADDING` in
both, so that there is room.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import functools
import importlib
import io
import multiprocessing
import os
import runpy
import signal
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Final

from unicron_lightning.prepared import set_by_script

FORK: Final = b"fork"
"""Agent to prepared process, with `FILES` descriptors: the text of the request, the standard files, a worker's socket.

The text is JSON: ``{"command": [...], "environment": {...}, "ignored": [...]}``, the last one with numbers of signals.
"""
FILES: Final = 5
NO_ROOM: Final = b"no room"
"""Answer over the worker's socket in place of its process number: the request is longer than `show` can write."""
LIGHTNING: Final = "lightning"
"""Argument of the prepared process: workers use Lightning."""
LOOP: Final = "loop"
"""Argument of the prepared process: workers do not use Lightning, as of `unicron_lightning.Run`."""
GO: Final = b"go"
"""Agent to worker, which has reported its process number: the program may begin."""


PADDING_NAME: Final = "UNICRON_PREPARED_PADDING"
"""Variable of the prepared process alone."""
PADDING: Final = "-" * 16384

_PR_SET_MM: Final = 35
_PR_SET_MM_MAP: Final = 14
_FIELDS: Final = {
    "start_code": 26, "end_code": 27, "start_data": 45, "end_data": 46, "start_brk": 47, "start_stack": 28,
    "arg_start": 48, "arg_end": 49, "env_start": 50, "env_end": 51,
}  # fmt: skip
"""Places in ``/proc/PID/stat``, as proc(5) counts them."""


class _Map(ctypes.Structure):
    """The kernel's ``struct prctl_mm_map``."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in (
            "start_code", "end_code", "start_data", "end_data", "start_brk", "brk", "start_stack",
            "arg_start", "arg_end", "env_start", "env_end", "auxv",
        )),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )  # fmt: skip


def move_environment() -> None:
    """Have C's environment point to copies of its strings, so that the original ones can be overwritten.

    Only complete before libraries are loaded which may keep pointers to values.
    """
    os.environ.pop(PADDING_NAME, None)
    for name, value in list(os.environ.items()):
        os.environ[name] = value


def show(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Have the system show a command line and an environment for this process and those that it forks.

    Returns:
        Whether there is room; otherwise nothing has changed.
    """
    at = dict(_map_at_start())
    arguments = b"".join(os.fsencode(word) + b"\0" for word in command)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    places = (at["arg_start"], at["arg_end"], arguments), (at["env_start"], at["env_end"], variables)
    if any(start == 0 or len(content) > end - start for start, end, content in places):
        return False
    for start, end, content in places:
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, content, len(content))
    at["arg_end"], at["env_end"] = (start + len(content) for start, _, content in places)
    _set_ends(at)
    return True


@functools.cache
def _map_at_start() -> Mapping[str, int]:
    """Return the places that the kernel had filled, which processes that this one forks then have, too."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return {name: int(fields[place - 3]) for name, place in _FIELDS.items()}


def _set_ends(at: Mapping[str, int]) -> None:
    """Have what is shown end with its content; on kernels that refuse it, empty words follow."""
    library = ctypes.CDLL(None)
    library.sbrk.restype = ctypes.c_void_p
    mapped = _Map(**at, brk=library.sbrk(0), exe_fd=0xFFFFFFFF)
    size = ctypes.c_ulong(ctypes.sizeof(mapped))
    library.prctl(_PR_SET_MM, ctypes.c_ulong(_PR_SET_MM_MAP), ctypes.byref(mapped), size, ctypes.c_ulong(0))


OPTIONS = ("-u",)
"""Interpreter's options of all workers, and of the prepared process."""


_BY_INTERPRETER: Final = {signal.SIGPIPE, signal.SIGXFSZ}
"""Signals that an interpreter ignores, whatever it has inherited."""


def ignore(inherited: Collection[int]) -> None:
    """Ignore the signals that an ordinary worker would, and no others.

    Args:
        inherited: those that the agent ignores now.
    """
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        wanted = number in inherited or number in _BY_INTERPRETER
        if wanted and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_IGN)
        elif not wanted and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def become(command: Sequence[str], environment: Mapping[str, str], changes: Mapping[str, str | None]) -> None:
    """Take over a worker's environment, and renew what imports have read from it or from the system.

    Args:
        command: the worker's.
        environment: the worker's.
        changes: what imports have set in the prepared process' environment, and would have in the worker's; None: they
            have removed it.
    """
    os.environ.clear()
    os.environ.update(environment)
    for name, value in changes.items():
        os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
    sys.orig_argv[:] = command
    multiprocessing.current_process().authkey = os.urandom(32)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    importlib.invalidate_caches()
    _renew_ranks()
    if environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1":
        from unicron_lightning import autoload

        autoload.install()
        set_by_script.forget()


def _renew_ranks() -> None:
    """Set the rank that loggers and warnings of Lightning and torchmetrics have read at their import."""
    if (module := sys.modules.get("lightning.fabric.utilities.rank_zero")) is not None:
        module.rank_zero_only.rank = module._get_rank() or 0
    if (module := sys.modules.get("torchmetrics.utilities.prints")) is not None:
        module.rank_zero_only.rank = int(os.environ.get("LOCAL_RANK", "0"))


def run(command: Sequence[str]) -> None:
    """Run the program of a worker's command in a fresh ``__main__``; an exception ends it as it ends an interpreter.

    Raises:
        SystemExit: the program has ended with another status than 0.
    """
    words = list(command[1 + len(OPTIONS) :])
    main = ModuleType("__main__")
    main.__dict__.update({"__builtins__": builtins, "__annotations__": {}})
    sys.modules["__main__"] = main
    try:
        if words[0] == "-m":
            _run_module(words)
        else:
            _run_script(words, main)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - as the interpreter does at its end
        _fail(error)


def _run_module(words: list[str]) -> None:
    sys.argv[:] = words[:1] + words[2:]
    if not _safe_path():
        sys.path.insert(0, os.getcwd())  # noqa: PTH109 - a str
    runpy._run_module_as_main(words[1])  # type: ignore[attr-defined] # what `python -m` calls


def _run_script(words: list[str], main: ModuleType) -> None:
    script = os.path.abspath(words[0])  # noqa: PTH100 - unlike Path.absolute() as the interpreter does
    sys.argv[:] = words
    if not _safe_path():
        sys.path.insert(0, str(Path(script).resolve().parent))
    main.__file__, main.__loader__ = script, SourceFileLoader("__main__", script)
    main.__dict__["__cached__"] = None
    with io.open_code(script) as file:
        code = compile(file.read(), script, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _safe_path() -> bool:
    return bool(getattr(sys.flags, "safe_path", False))  # from Python 3.11 on


def _fail(error: BaseException) -> None:
    """Report an exception without the frames of this package, and end as the interpreter does."""
    own = Path(__file__).parent
    trace = error.__traceback__
    while trace is not None and Path(trace.tb_frame.f_code.co_filename).parent == own:
        trace = trace.tb_next
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    if not isinstance(error, KeyboardInterrupt):
        raise SystemExit(1)
    threading._shutdown()  # type: ignore[attr-defined] # the end of an interpreter, before the signal's own end
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
