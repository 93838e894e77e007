"""The command ``unicron``: run a coordinator, query one, or plan.

    unicron run SCRIPT [--workers N]           train a script on this machine, with one command
    unicron coordinator [key=value ...]        run a coordinator (--cfg job: show its configuration)
    unicron status [--task T] [--json]         show its tasks, members and agents
    unicron events [--task T] [--since SEQ]    show the event log
    unicron incidents [--task T] [--csv]       show the cost of failures
    unicron checkpoints TASK [--json]          show the versions of its state, in memory and on disk
    unicron resize TASK N|all                  set the number of nodes of a task, from the next step on
    unicron relayout TASK --tp T --pp P        spread a Megatron task's model over T x P workers
    unicron relayout TASK --shards S           divide a model of unicron_fsdp into S shards
    unicron drain NODE [NODE ...]              remove the workers of nodes between two steps
    unicron undrain NODE [NODE ...]            allow workers on nodes again
    unicron inject FAULT --task TASK           inject a fault into a task
    unicron agent [--node LABEL] [--slots N]   run submitted tasks on this node: a daemon
    unicron submit FILE [--set KEY=VALUE]      have the nodes' daemons run a task
    unicron cancel TASK [--save]               end a task now, or once a checkpoint is written
    unicron jobs [--json]                      show tasks that wait, run, or have ended
    unicron top [--once]                       watch tasks and nodes
    unicron logs TASK [--rank R] [--follow]    show a task's output on this node
    unicron certs DIR [--host HOST]            make a CA, and certificates that it signs
    unicron export CHECKPOINT OUTPUT           write a checkpoint of unicron_fsdp to one file
    unicron plan FILE [--what-if EVENT NAME]   compute the best allocation of workers to tasks, without a coordinator
    unicron completion SHELL                   print the completion of these commands for bash, zsh or tcsh

The coordinator's address is --endpoint, else the environment variable UNICRON_ENDPOINT, else 127.0.0.1:29461.

Exit status: 0 done; 1 the coordinator could not run, or the task of `run` or `submit --wait` failed; 2 wrong usage or
configuration, a refused order, or no coordinator answers; 130 `run` was interrupted by Ctrl-C.
"""

from __future__ import annotations


def main(arguments: list[str] | None = None) -> None:
    """Run the console script, then end the process.

    The commands are imported here: training imports texts of this package, and none of them.

    Args:
        arguments: the command line without the program's name; default: the process's.
    """
    from unicron_lightning.cli.commands import main as run

    run(arguments)
