"""A worker's program that prints what it has from its start, as JSON, and ends as its first argument specifies.

Modules are imported where they are used: an ordinary start prints what it has before it imports torch.
"""

import json
import os
import sys

BEFORE = sorted(name for name in sys.modules if "." not in name)


def of_system() -> dict[str, object]:
    """What the kernel knows."""
    import resource
    import signal
    from pathlib import Path

    status = {
        name: text.split()
        for name, _, text in (line.partition(":") for line in Path("/proc/self/status").read_text().splitlines())
    }
    kept = ("Umask", "SigBlk", "SigIgn", "SigPnd", "Groups", "Uid", "Gid", "CapEff", "NoNewPrivs", "Threads")
    block = Path("/proc/self/environ").read_bytes().rstrip(b"\0").split(b"\0")
    return {
        **{name: status.get(name) for name in kept},
        "SigCgt": int(status["SigCgt"][0], 16) & 0x7FFFFFFF,  # the C library takes some above when a thread is made
        "leads": (os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()),
        "folder": str(Path.cwd()),
        "limits": {n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT_")},
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        "affinity": sorted(os.sched_getaffinity(0)),
        "files": {n: os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if int(n) < 3},
        "more_files": sum(each.exists() for each in Path("/proc/self/fd").iterdir()),
        "handlers": {n: str(signal.getsignal(n)) for n in signal.valid_signals() if n not in (9, 19)},
        "environ": sorted(os.fsdecode(each) for each in block),
        "cmdline": [os.fsdecode(w) for w in Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").split(b"\0")],
        "oom": Path("/proc/self/oom_score_adj").read_text(),
        "cgroup": Path("/proc/self/cgroup").read_text(),
        "exe": os.readlink("/proc/self/exe"),
    }


def of_python() -> dict[str, object]:
    """What the interpreter has."""
    import threading

    main = sys.modules["__main__"]
    return {
        "variables": dict(os.environ),
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "executable": sys.executable,
        "flags": str(sys.flags),
        "warnoptions": sys.warnoptions,
        "main": {k: str(type(v)) for k, v in vars(main).items() if k.startswith("__")},
        "file": main.__file__,
        "spec": (main.__spec__.name, main.__spec__.origin) if main.__spec__ else None,
        "package": main.__package__,
        "loader": str(type(main.__loader__)),
        "function": of_python.__module__,
        "frames": len(stack()),
        "threads": [each.name for each in threading.enumerate()],
        "streams": [
            (s.fileno(), s.encoding, s.errors, s.line_buffering, s.write_through, s.isatty(), str(type(s.buffer)))
            for s in (sys.stdin, sys.stdout, sys.stderr)
        ],
        "hooks": (sys.excepthook.__module__, sys.unraisablehook.__module__, str(sys.gettrace())),
        "recursion": sys.getrecursionlimit(),
        "annotations": "annotations" in main.__dict__,
    }


def stack() -> list[str]:
    """Frames of the program itself."""
    import traceback

    return [frame.name for frame in traceback.extract_stack() if frame.filename == __file__]


def of_libraries() -> dict[str, object]:
    """What libraries have read at their import."""
    import gc
    import logging
    import multiprocessing
    import random
    import tempfile
    import warnings
    from multiprocessing import resource_tracker

    import lightning.pytorch
    import numpy
    import torch
    from lightning.fabric.utilities import rank_zero
    from torchmetrics.utilities import prints

    import unicron_lightning.strategies.unicron  # noqa: F401

    return {
        "rank": (rank_zero.rank_zero_only.rank, prints.rank_zero_only.rank),
        "seed": (torch.initial_seed(), torch.rand(2).tolist()),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "default": (str(torch.get_default_dtype()), torch.is_grad_enabled(), str(torch.get_default_device())),
        "cuda": (torch.cuda.is_available(), torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork()),
        "start": (multiprocessing.get_start_method(allow_none=True), multiprocessing.current_process().name),
        "tracker": resource_tracker._resource_tracker._fd,
        "children": len(multiprocessing.active_children()),
        "temporary": tempfile.gettempdir(),
        "gc": (gc.get_threshold(), gc.isenabled()),
        "logging": [(each.name, each.level, len(each.handlers), len(each.filters)) for each in map(logging.getLogger, (
            "", "lightning.pytorch", "lightning.fabric.utilities.seed", "unicron_lightning"))],
        "warnings": len(warnings.filters),
        "variables": dict(os.environ),
        "versions": (torch.__version__, lightning.pytorch.__version__, numpy.__version__),
        "initialized": (torch.distributed.is_available(), torch.distributed.is_initialized()),
        "excepthook": sys.excepthook.__module__,
        "own": {"random": random.random(), "numpy": float(numpy.random.rand()),
                "authkey": multiprocessing.current_process().authkey.hex()},
    }  # fmt: skip


def end(how: str) -> None:
    """End the process."""
    import signal

    if how.isdigit():
        sys.exit(int(how))
    if how == "text":
        sys.exit("an end with a text")
    if how == "error":
        raise ValueError("an end with an error")
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "atexit":
        import atexit

        atexit.register(print, "said at the exit")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "wait":
        print("waits", flush=True)
        signal.pause()


if __name__ == "__main__":
    if sys.argv[1] == "print":
        print(json.dumps({"system": of_system(), "python": of_python(), "libraries": of_libraries()}))
    else:
        end(sys.argv[1])
