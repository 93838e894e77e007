"""``unicron inject``: injects faults into a task, by order of an operator."""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from heapq import merge
from typing import Any

from unicron_lightning.cli.client import access_of, answering, fetch, quoted
from unicron_lightning.cli.output import visible
from unicron_lightning.errors import CoordinatorUnavailable, UnicronError
from unicron_lightning.faults.arrivals import arrivals
from unicron_lightning.faults.fault import Fault
from unicron_lightning.faults.language import text
from unicron_lightning.faults.script import Faults


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of ``unicron``."""
    inject = commands.add_parser(
        "inject", parents=[answering()], help="inject faults into a task (docs/faults.md has the language)"
    )
    inject.add_argument("faults", nargs="*", metavar="FAULT", help='e.g. "kill rank=1", "stop node=b for=5s"')
    inject.add_argument("--file", metavar="PATH", help="a YAML list of more")
    inject.add_argument("--task", metavar="TASK", help="torchrun's --rdzv-id; else each fault has task=")
    inject.add_argument("--seed", type=int, default=None, help="seed of random draws; default: another each time")
    inject.set_defaults(run=_inject)


def _inject(options: argparse.Namespace) -> int:
    faults = Faults([*Faults(options.faults), *(Faults.read(options.file) if options.file else ())])
    if options.seed is not None:
        faults = faults.seeded(options.seed)
    if not faults:
        raise UnicronError('nothing to inject: expected faults, e.g. "kill rank=1"')
    for fault in faults:
        if (fault.task or options.task) is None:
            raise UnicronError(f"{text(fault)!r}: no task: expected --task TASK, or task= in the fault")
    began = time.monotonic()
    for at, fault in _schedule(faults, random.randrange(1 << 32)):
        time.sleep(max(0.0, began + at - time.monotonic()))
        _order(options, fault)
    return 0


def _schedule(faults: Faults, seed: int) -> Iterator[tuple[float, Fault]]:
    """Iterate over strikes with their seconds from now, in order; endless if a fault has a rate and no ``times``."""

    def strikes(place: int, fault: Fault) -> Iterator[tuple[float, int, int, Fault]]:
        once = replace(fault, after=None, rate=None, times=fault.times if fault.waits and fault.rate is None else None)
        for number, at in enumerate(arrivals(fault, place, seed=seed)):
            own = None if fault.seed is None else fault.seed + number  # another victim each time
            yield at, place, number, replace(once, seed=own)
            if once.times is not None:  # the worker counts the strikes
                return

    for at, _, _, fault in merge(*(strikes(place, fault) for place, fault in enumerate(faults))):
        yield at, fault


def _order(options: argparse.Namespace, fault: Fault) -> None:
    path = f"/v1/tasks/{quoted(fault.task or options.task)}/inject"
    access = access_of(options)
    fatal = fault.kind == "kill coordinator" and not fault.waits
    if fatal:  # afterwards, a killed coordinator looks like one that never ran
        fetch(options.endpoint, "/v1/status", access)
    try:
        answer: dict[str, Any] = fetch(options.endpoint, path, access, method="POST", body={"fault": text(fault)})
    except CoordinatorUnavailable:
        if not fatal:
            raise
        answer = {"fault": text(fault), "targets": ["coordinator"]}
    # One line for each strike: with a rate there is no end.
    line = json.dumps(answer) if options.json else visible(f"{answer['fault']}: {', '.join(answer['targets'])}")
    print(line, flush=True)
