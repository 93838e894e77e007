"""Runs scenarios under the reference and under ``unicron``, and compares the records."""

from __future__ import annotations

import io
import math
import os
import random
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from conformance.lab import Lab, Record, observed
from conformance.table import Scenario
from lightning.pytorch import seed_everything
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.utilities.rank_zero import WarningCache

SECONDS = 60
"""Most that one run of a scenario may take."""
_NUMBER = re.compile(r"(\d+\.\d+)")
"""In a text."""
TOLERANCE = 1e-6
"""Relative difference of two numbers that counts as none."""


def run(scenario: Scenario, strategy: str) -> Record:
    """Run a scenario once in this process; return its record, to which an error that it raises belongs."""
    folder = Path(tempfile.mkdtemp(prefix="conf-"))
    lab = Lab(strategy, folder)
    try:
        record_of(scenario, lab)
    finally:
        if strategy == "ddp" and dist.is_initialized():
            dist.destroy_process_group()
        shutil.rmtree(folder, ignore_errors=True)
    return lab.record


def record_of(scenario: Scenario, lab: Lab) -> None:
    """Run a scenario in a lab, and put back what it has changed in the process."""
    before, environment = Path.cwd(), dict(os.environ)
    os.chdir(lab.folder)
    seed_everything(7, verbose=False)
    for cache in _warning_caches():
        cache.clear()
    random.seed(7)
    try:
        with observed(lab), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), _limited():
            try:
                scenario.run(lab)
            except (Exception, KeyboardInterrupt, SystemExit) as error:  # noqa: BLE001 (the record is compared)
                lab.record["error"] = lab.error(error)
        lab.meet()
        lab.end()
    finally:
        os.chdir(before)
        os.environ.clear()
        os.environ.update(environment)
        torch.set_grad_enabled(True)


def _warning_caches() -> Iterator[WarningCache]:
    """Yield Lightning's memories of its warnings."""
    yield Closure.warning_cache
    for name, module in list(sys.modules.items()):
        if name.startswith("lightning."):
            yield from (each for each in vars(module).values() if isinstance(each, WarningCache))


@contextmanager
def _limited() -> Iterator[None]:
    def late(*about: Any) -> None:
        raise TimeoutError(f"the scenario has taken {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def differences(mine: Any, theirs: Any, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the places where two records differ, with both values."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        if mine.keys() == theirs.keys() == {"class", "bases", "message"}:
            mine, theirs = _as_caught(mine, theirs["class"]), {**theirs, "bases": []}
        for name in [*theirs, *(mine.keys() - theirs.keys())]:
            place = f"{where}.{name}" if where else name
            if name not in mine or name not in theirs:
                yield place, mine.get(name, "(missing)"), theirs.get(name, "(missing)")
            else:
                yield from differences(mine[name], theirs[name], place)
    elif isinstance(mine, list) and isinstance(theirs, list):
        if len(mine) != len(theirs):
            yield where, mine, theirs
        else:
            for number, pair in enumerate(zip(mine, theirs, strict=True)):
                yield from differences(*pair, f"{where}.{number}")
    elif not _equal(mine, theirs):
        yield where, mine, theirs


def _as_caught(error: Record, expected: str) -> Record:
    """Return an error as a script sees it that catches the class that the reference raises."""
    return {**error, "class": expected if expected in error["bases"] else error["class"], "bases": []}


def _equal(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, float) and isinstance(theirs, float):
        return (math.isnan(mine) and math.isnan(theirs)) or math.isclose(
            mine, theirs, rel_tol=TOLERANCE, abs_tol=TOLERANCE
        )
    if isinstance(mine, str) and isinstance(theirs, str) and mine != theirs:
        pair = [_NUMBER.split(each) for each in (mine, theirs)]  # text and numbers in turn
        return pair[0][::2] == pair[1][::2] and all(map(_equal, *(map(float, each[1::2]) for each in pair)))
    return type(mine) is type(theirs) and bool(mine == theirs)
