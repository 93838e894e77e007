"""``unicron resize``, ``relayout``, ``drain``, ``undrain`` and ``inject``: orders to a coordinator."""

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
from unicron_lightning.cli.output import all_visible, visible
from unicron_lightning.errors import ConfigError, CoordinatorUnavailable, UnicronError
from unicron_lightning.faults.arrivals import arrivals
from unicron_lightning.faults.fault import Fault
from unicron_lightning.faults.language import text
from unicron_lightning.faults.script import Faults


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands to those of ``unicron``."""
    resize = commands.add_parser("resize", parents=[answering()], help="set the number of nodes of a task")
    resize.add_argument("task", metavar="TASK", help="torchrun's --rdzv-id")
    resize.add_argument("nodes", metavar="N|all", help="within --nnodes MIN:MAX; all: all available ones, up to MAX")
    resize.set_defaults(run=_resize)
    other = "change the layout of a model that is spread over workers, through a checkpoint"
    relayout = commands.add_parser("relayout", parents=[answering()], help=other)
    relayout.add_argument("task", metavar="TASK", help="torchrun's --rdzv-id")
    relayout.add_argument("--tp", metavar="T", help="tensor-parallel size of a Megatron task")
    relayout.add_argument("--pp", metavar="P", help="pipeline stages of a Megatron task")
    relayout.add_argument("--shards", metavar="S", help="workers of a replica of a task of unicron_fsdp")
    relayout.set_defaults(run=_relayout)
    for verb, does in (("drain", "remove the workers of a node"), ("undrain", "allow workers on a node again")):
        order = commands.add_parser(verb, parents=[answering()], help=does)
        order.add_argument("nodes", nargs="+", metavar="NODE", help="a node's label, or an agent's id")
        order.set_defaults(run=_drain, verb=verb)
    _add_inject(commands)


def _resize(options: argparse.Namespace) -> int:
    path = f"/v1/tasks/{quoted(options.task)}/resize"
    answer = fetch(options.endpoint, path, access_of(options), method="POST", nodes=options.nodes)
    shown = all_visible(answer)
    return _print(options, answer, f"{shown['task']}: {shown['nodes'] or 'all'} nodes")


def _relayout(options: argparse.Namespace) -> int:
    path = f"/v1/tasks/{quoted(options.task)}/relayout"
    sizes = {name: size for name in ("tp", "pp", "shards") if (size := getattr(options, name)) is not None}
    if set(sizes) not in ({"tp", "pp"}, {"shards"}):
        raise ConfigError(
            f"relayout with {', '.join(f'--{name}' for name in sizes) or 'no size'}: expected --tp and --pp, "
            "or --shards"
        )
    answer = fetch(options.endpoint, path, access_of(options), method="POST", **sizes)
    shown = all_visible(answer)
    words = ", ".join(f"{name}={shown[name]}" for name in sizes)
    return _print(options, answer, f"{shown['task']}: {words} after a checkpoint")


def _drain(options: argparse.Namespace) -> int:
    for node in options.nodes:
        path = f"/v1/nodes/{quoted(node)}/{options.verb}"
        answer = fetch(options.endpoint, path, access_of(options), method="POST")
    shown = all_visible(answer)
    staying = [f"{node} stays: {reason}" for node, reason in shown["staying"].items()]
    return _print(options, answer, f"drained: {', '.join(shown['drained']) or 'none'}", *staying)


def _print(options: argparse.Namespace, answer: Any, *lines: str) -> int:
    print(json.dumps(answer, indent=2) if options.json else "\n".join(lines))
    return 0


def _add_inject(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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
