"""``unicron plan FILE``: the number and places of each task's workers, with reasons."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from unicron_lightning.errors import ConfigError

if TYPE_CHECKING:
    from unicron_lightning.cli.plan.situation import NodeConfig

EVENTS = {
    "node-loss": "a node fails: its name, or a task, which loses its largest node",
    "join": "a node is added: its name if it is not ready, else its kind, if any",
    "finish": "a task ends: its name",
    "launch": "a queued task is to run: its name",
}

_EXAMPLES = ("six_tasks_128_gpus", "two_kinds")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of ``unicron``."""
    parser = commands.add_parser(
        "plan",
        help="compute the best allocation of workers to tasks, and where they go",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="events of --what-if, which happens once the plan is in force:\n"
        + "\n".join(f"  {name:10} {meaning}" for name, meaning in EVENTS.items()),
    )
    parser.add_argument("file", nargs="?", metavar="FILE", help="cluster and tasks, in YAML")
    parser.add_argument(
        "--example", nargs="?", const=_EXAMPLES[0], choices=_EXAMPLES, help="print an example of such a file"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a value of the file")
    parser.add_argument("--nodes", metavar="LIST", help="nodes of Kubernetes, Slurm or a coordinator: - or a file")
    parser.add_argument("--island-label", metavar="KEY", help="label of Kubernetes' nodes that names their island")
    parser.add_argument("--what-if", nargs="+", metavar=("EVENT", "NAME"), help=", ".join(EVENTS))
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--picture", metavar="PATH", help="draw F(t,x) with the chosen points (PNG, SVG or PDF)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        ConfigError: something in the file or the options is wrong.
    """
    if options.example:
        path = resources.files("unicron_lightning.conf").joinpath(f"examples/{options.example}.yaml")
        print(path.read_text(encoding="utf-8"), end="")
        return 0
    if options.file is None:
        raise ConfigError("plan: no FILE: expected one (unicron plan --example prints one to begin with)")
    event = options.what_if or []
    if len(event) > 2:
        raise ConfigError(f"--what-if {' '.join(event)}: expected an event and at most one name")
    try:
        return _run(options, event)
    except ConfigError:
        raise
    except ValueError as error:
        # Raised by the planner's own checks of values from the file.
        raise ConfigError(f"{options.file}: {error}") from error


def _run(options: argparse.Namespace, event: list[str]) -> int:
    # Modules that compile or compute are imported only here, so that `unicron status` stays fast.
    from rich.console import Console

    from unicron_lightning.cli.plan.report import as_json, draw, show, what_if
    from unicron_lightning.cli.plan.situation import read, situation_of
    from unicron_lightning.planner.fleet import solve_fleet

    path = Path(options.file)
    config = read(path, options.set)
    if options.island_label is not None and options.nodes is None:
        raise ConfigError(
            f"--island-label {options.island_label}: expected it with --nodes, whose nodes have the label"
        )
    if options.nodes is not None:
        cluster = dataclasses.replace(config.cluster, num_nodes=0, nodes=_listed(options.nodes, options.island_label))
        config = dataclasses.replace(config, cluster=cluster)
    situation = situation_of(config, path.parent)
    plan = solve_fleet(situation.fleet)
    placement = situation.place(plan)
    parts = [(path.name, plan, placement, situation.assumed)]
    if event:
        outcome = what_if(situation, plan, placement, event[0], event[1] if len(event) > 1 else None)
        parts.append((f"if {outcome.words}", outcome.plan, outcome.situation.place(outcome.plan), False))
    if options.picture:
        draw(Path(options.picture), parts[-1][0], parts[-1][1])
    if options.json:
        answer = {name: as_json(part[1], part[2]) for name, part in zip(("plan", "what_if"), parts, strict=False)}
        print(json.dumps(answer, indent=2))
        return 0
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # a pipe has no width
    unsaid = {name for name, task in situation.config.items() if task.may_pause is None}
    for title, each, where, assumed in parts:
        show(console, title, each, where, assumed=assumed, unsaid=unsaid)
    return 0


def _listed(source: str, island_label: str | None) -> dict[str, NodeConfig]:
    from unicron_lightning.cli.plan.inventory import nodes_in

    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--nodes {source}: {error.strerror}: expected a file with a list of nodes") from error
    return nodes_in(text, source, island_label)
