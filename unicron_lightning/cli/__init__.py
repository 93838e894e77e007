"""The command ``unicron``: run a coordinator, ask one, or plan.

    unicron coordinator [key=value ...]        run a coordinator (--cfg job: show its configuration)
    unicron status [--task T] [--json]         what it coordinates
    unicron events [--task T] [--since SEQ]    what happened
    unicron incidents [--task T] [--csv]       what failures have cost
    unicron resize TASK N|all                  have so many nodes train a task, from the next step on
    unicron relayout TASK --tp T --pp P        have a Megatron task's model spread over T x P workers
    unicron drain NODE [NODE ...]              no workers there any more; they leave between two steps
    unicron undrain NODE [NODE ...]            workers may run there again
    unicron inject FAULT --task TASK           break a task on purpose
    unicron agent [--node LABEL] [--slots N]   run submitted tasks on this node: a daemon
    unicron submit FILE [--set KEY=VALUE]      have the nodes' daemons run a task
    unicron cancel TASK                        end a task now
    unicron jobs [--json]                      tasks that wait, run, or have ended
    unicron top [--once]                       watch tasks and nodes
    unicron logs TASK [--rank R] [--follow]    what a task prints on this node
    unicron plan FILE [--what-if EVENT NAME]   the best allocation of workers to tasks; asks no coordinator

Exit status: 0 done; 1 the coordinator could not run; 2 wrong usage or configuration, or no coordinator answers.
"""

from __future__ import annotations

import argparse
import os
import sys

from unicron_lightning.cli import incidents, inject, inspection, jobs, node, orders, top
from unicron_lightning.cli.output import visible
from unicron_lightning.errors import UnicronError
from unicron_lightning.planning.command import add_parser as add_plan_parser


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the console script; ends the process.

    Args:
        arguments: the command line without the program's name; default: the process's.
    """
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["coordinator"]:
        # Everything behind it is Hydra's, --help and --cfg included.
        from unicron_lightning.coordinator.__main__ import main as run_coordinator

        run_coordinator(given[1:])
        return
    options = _parser().parse_args(given)
    try:
        status: int = options.run(options)
    except UnicronError as error:
        print(f"unicron: {visible(str(error), lines=True)}", file=sys.stderr)
        status = 2
    except BrokenPipeError:
        # The reader, e.g. `head`, has seen enough; keep Python from complaining at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    sys.exit(status)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="unicron", description="Training that heals itself.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("coordinator", help="run a coordinator, configured by key=value (see --help behind it)")
    for group in (inspection, incidents, top, orders, inject, jobs, node):
        group.add_parsers(commands)
    add_plan_parser(commands)
    return parser
