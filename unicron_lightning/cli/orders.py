"""``unicron resize``, ``relayout``, ``drain`` and ``undrain``: orders to a coordinator."""

from __future__ import annotations

import argparse
import json
from typing import Any

from unicron_lightning.cli.client import access_of, answering, fetch, quoted
from unicron_lightning.cli.output import all_visible
from unicron_lightning.errors import ConfigError


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
