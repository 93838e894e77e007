"""Makes a forked process what an ordinary start of ``python -u SCRIPT ARGUMENTS`` or ``-m MODULE`` would have made.

Of what a process inherits from its parent only ignored signals are handled here: the rest is equal, or the agent does
not ask for a fork (`situation`).
"""

from __future__ import annotations

import atexit
import builtins
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
