"""Runs scenarios of a test folder in worlds of real processes, forked so that their libraries are imported once.

    PYTHONPATH=FOLDER forks.py MODULE...

FOLDER has the modules of the scenarios, which are imported by their bare names; the given modules are imported first,
in this order. Each line of the input is a request, and each line of the output the answer:

    {"scenario": "module:function", "world": 4, "arguments": {...}, "folder": "...", "seconds": 100}
    {"exits": [0, 0, -9, 0]}

Rank r writes the scenario's result to r.json in the request's folder, and its output to r.log.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")  # hide megatron-core's warnings about packages that are not installed

import torch  # noqa: E402

SCENARIO_SECONDS = 100
"""Default time limit of a rank, which then prints its stacks and exits; below the time limit of a test."""


def serve(modules: list[str]) -> None:
    """Answer requests until the input ends."""
    torch.set_num_threads(1)
    for name in modules:
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        children = [_fork(rank, request) for rank in range(request["world"])]
        exits = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps({"exits": exits}), flush=True)


def _fork(rank: int, request: dict[str, Any]) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        folder = Path(request["folder"])
        _redirect(folder / f"{rank}.log")
        faulthandler.dump_traceback_later(request.get("seconds", SCENARIO_SECONDS), exit=True)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(request["world"])}
        module, _, name = request["scenario"].partition(":")
        result = getattr(importlib.import_module(module), name)(rank, request["world"], folder, **request["arguments"])
        (folder / f"{rank}.json").write_text(json.dumps(result))
        code = 0
    except BaseException:  # noqa: BLE001 - a child must never return into the parent's loop
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _redirect(path: Path) -> None:
    """Redirect both outputs to a file, and the input to nothing."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


if __name__ == "__main__":
    serve(sys.argv[1:])
