"""``unicron resize``, ``relayout``, ``drain`` and ``undrain``: orders to a coordinator."""

from __future__ import annotations

import argparse

from unicron_lightning.cli.client import access_of, connecting, fetch, quoted
from unicron_lightning.cli.output import all_visible


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands to those of ``unicron``."""
    resize = commands.add_parser("resize", parents=[connecting()], help="set the number of nodes of a task")
    resize.add_argument("task", metavar="TASK", help="torchrun's --rdzv-id")
    resize.add_argument("nodes", metavar="N|all", help="within --nnodes MIN:MAX; all: all available ones, up to MAX")
    resize.set_defaults(run=_resize)
    other = "spread a Megatron task's model over T x P workers"
    relayout = commands.add_parser("relayout", parents=[connecting()], help=other)
    relayout.add_argument("task", metavar="TASK", help="torchrun's --rdzv-id")
    relayout.add_argument("--tp", required=True, metavar="T", help="tensor-parallel size")
    relayout.add_argument("--pp", required=True, metavar="P", help="pipeline stages")
    relayout.set_defaults(run=_relayout)
    for verb, does in (("drain", "remove the workers of a node"), ("undrain", "allow workers on a node again")):
        order = commands.add_parser(verb, parents=[connecting()], help=does)
        order.add_argument("nodes", nargs="+", metavar="NODE", help="a node's label, or an agent's id")
        order.set_defaults(run=_drain, verb=verb)


def _resize(options: argparse.Namespace) -> int:
    path = f"/v1/tasks/{quoted(options.task)}/resize"
    answer = all_visible(fetch(options.endpoint, path, access_of(options), method="POST", nodes=options.nodes))
    print(f"{answer['task']}: {answer['nodes'] or 'all'} nodes")
    return 0


def _relayout(options: argparse.Namespace) -> int:
    path = f"/v1/tasks/{quoted(options.task)}/relayout"
    answer = all_visible(fetch(options.endpoint, path, access_of(options), method="POST", tp=options.tp, pp=options.pp))
    print(f"{answer['task']}: tp={answer['tp']}, pp={answer['pp']} after a checkpoint")
    return 0


def _drain(options: argparse.Namespace) -> int:
    for node in options.nodes:
        path = f"/v1/nodes/{quoted(node)}/{options.verb}"
        answer = all_visible(fetch(options.endpoint, path, access_of(options), method="POST"))
    print(f"drained: {', '.join(answer['drained']) or 'none'}")
    for node, reason in answer["staying"].items():
        print(f"{node} stays: {reason}")
    return 0
