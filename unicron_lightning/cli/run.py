"""``unicron run SCRIPT``: train a script on this machine, as nodes of a local cluster, with one command."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from unicron_lightning import environ
from unicron_lightning.agent.options import DEFAULT_HOST, parse_endpoint
from unicron_lightning.cli.client import DEFAULT_ENDPOINT
from unicron_lightning.cli.node import Tail
from unicron_lightning.cli.output import visible
from unicron_lightning.credentials import token_for
from unicron_lightning.errors import ConfigError
from unicron_lightning.private_files import default_state_dir
from unicron_lightning.tls import Access

if TYPE_CHECKING:
    from unicron_lightning.local_cluster.cluster import LocalCluster

_POLL_SECONDS: Final = 0.2
_STOP_SECONDS: Final = 15.0
_INTERRUPTED: Final = 130


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of ``unicron``."""
    run = commands.add_parser(
        "run",
        help="train a script on this machine, with one command",
        usage="unicron run SCRIPT [--workers N] [--nodes MIN:MAX] [--task NAME]\n"
        "                   [--logs DIR] [--endpoint HOST:PORT] [--no-prepare]\n"
        "                   [-- ARGUMENT ...]",
        description="Start a torchrun for each worker, print their outputs, and stop all of them with Ctrl-C.",
    )
    run.add_argument("script", metavar="SCRIPT", help="the training script, with Trainer(strategy='unicron')")
    run.add_argument("--workers", type=int, default=2, metavar="N", help="started now, each one node; default: 2")
    run.add_argument("--nodes", metavar="MIN:MAX", help="torchrun's --nnodes; default: from 1 to the workers")
    run.add_argument("--task", metavar="NAME", help="torchrun's --rdzv-id; default: the script's name")
    run.add_argument("--logs", metavar="DIR", help="where the nodes' outputs stay; default: nowhere after a success")
    run.add_argument(
        "--endpoint", metavar="HOST:PORT", help=f"of this machine; default: {environ.ENDPOINT}, else a free one"
    )
    run.add_argument(
        "--prepare",
        action=argparse.BooleanOptionalAction,
        help=f"whether replacements are forked by a process that has imported Lightning; default: {environ.PREPARE}, "
        "else yes",
    )
    run.set_defaults(run=_run)


def divided(given: list[str]) -> tuple[list[str], list[str]]:
    """Divide a command line into this command's words and those of the script, which follow ``--``."""
    at = given.index("--") if given[:1] == ["run"] and "--" in given else len(given)
    return given[:at], given[at + 1 :]


def _run(options: argparse.Namespace) -> int:
    from unicron_lightning.local_cluster.cluster import LocalCluster
    from unicron_lightning.local_cluster.processes import sigterm_raises

    script = Path(options.script)
    if not script.is_file():
        raise ConfigError(f"run {options.script}: no such file; expected a training script")
    if options.workers < 1:
        raise ConfigError(f"--workers {options.workers}: expected a number >= 1")
    cluster = LocalCluster(
        [script.absolute(), *options.arguments],
        nodes=options.workers,
        nnodes=options.nodes,
        task=options.task or script.stem,
        conf={} if options.prepare is None else {"prepare": options.prepare},
        folder=Path(options.logs) if options.logs else None,
        stop_seconds=_STOP_SECONDS,
    )
    try:
        _use_own_endpoint(cluster, options.endpoint or os.environ.get(environ.ENDPOINT))
    except ConfigError:
        cluster.close()
        raise
    workers = "1 worker" if options.workers == 1 else f"{options.workers} workers"
    print(f"unicron: {workers} of task {cluster.task}, endpoint {cluster.endpoint}", file=sys.stderr)
    with sigterm_raises():
        return _train(cluster, options.logs)


def _train(cluster: LocalCluster, logs: str | None) -> int:
    """Run the cluster to its end; return the exit status of this command."""
    succeeded = False
    outputs: list[_Output] = []
    try:
        cluster.start()
        outputs = [_Output(node, Tail(cluster.processes.log(f"agent-{node}"))) for node in cluster.agents]
        succeeded = _follow(cluster, outputs)
        return 0 if succeeded else 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    finally:
        cluster.close(keep=not succeeded)
        for output in outputs:  # also what the nodes have printed while they ended, such as where the state is saved
            output.close()
        if not succeeded and logs:  # the cluster logs a folder of its own
            print(f"unicron: the nodes' outputs are in {visible(str(cluster.folder))}", file=sys.stderr)


def _use_own_endpoint(cluster: LocalCluster, given: str | None) -> None:
    """Use the user's token, endpoint and state folder, so that other commands find the task.

    Args:
        cluster: not started yet.
        given: endpoint chosen by the user; None: the default one, or another if it is in use.

    Raises:
        ConfigError: the given endpoint is in use, or is not on the loopback interface.
    """
    host, port = parse_endpoint(given or DEFAULT_ENDPOINT)
    if host not in (DEFAULT_HOST, "localhost"):
        raise ConfigError(f"run: endpoint {given}: expected {DEFAULT_HOST}:PORT, since all nodes are on this machine")
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((DEFAULT_HOST, port))
        cluster.port = port
    except OSError as error:
        if given is not None:
            raise ConfigError(
                f"run: endpoint {given}: {error.strerror}; expected a free port of this machine"
            ) from None
    cluster.state_dir = default_state_dir(DEFAULT_HOST, cluster.port)
    token = token_for(DEFAULT_HOST, None, option="--token-file ")
    cluster.access = Access(token=token)
    cluster.processes.environment[environ.TOKEN] = token.secret


def _follow(cluster: LocalCluster, outputs: list[_Output]) -> bool:
    """Print the nodes' outputs until all have ended; return whether the task succeeded."""
    started, running = time.time(), True
    while running:
        running = any(agent.poll() is None for agent in cluster.agents.values())
        for output in outputs:
            output.print()
        if running:
            time.sleep(_POLL_SECONDS)
    ends = [event["fields"]["succeeded"] for event in cluster.events("task_over") if event["at"] >= started]
    return bool(ends and ends[-1])


class _Output:
    """The output of a node, whose whole lines are printed with the node's name before them."""

    def __init__(self, node: str, tail: Tail) -> None:
        self._node, self._tail, self._rest = node, tail, ""

    def print(self) -> None:
        """Print the lines that have been completed since the last call."""
        *lines, self._rest = (self._rest + self._tail.read()).split("\n")
        for line in lines:
            print(f"{self._node} | {line}", flush=True)

    def close(self) -> None:
        """Print the rest, with an unfinished line, and close the file."""
        self.print()
        if self._rest:
            print(f"{self._node} | {self._rest}", flush=True)
        self._tail.close()
