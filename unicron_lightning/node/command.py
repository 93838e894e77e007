"""The command line and environment by which a daemon starts torchrun."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from unicron_lightning import environ
from unicron_lightning.node.launch import DAEMON_PID, PIPES
from unicron_lightning.node.options import NodeOptions
from unicron_lightning.wire.daemon import Launch

_CONNECT_SECONDS: Final = 900
_TOKEN_FILE: Final = "token"


def hand_token(options: NodeOptions, scratch: Path) -> None:
    """Write the token to a file for torchrun alone: arguments are visible to all users, and workers inherit
    variables.
    """
    if options.token_file is None:
        path = scratch / _TOKEN_FILE
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
            file.write(options.token.secret)


def torchrun_command(launch: Launch, options: NodeOptions, scratch: Path) -> list[str]:
    """Return the arguments of the process.

    Args:
        launch: the agent to run.
        options: the daemon's options.
        scratch: folder of this start, with the file of `hand_token`.
    """
    job = launch.job
    conf = {"node": options.node, "slot": launch.slot, "weight": f"{job.weight!r}", "embedded": "false"}
    # The order to start has just arrived: an absent coordinator is being restarted.
    conf["connect_timeout"] = f"{_CONNECT_SECONDS}"
    conf["token_file"] = str(options.token_file or scratch / _TOKEN_FILE)
    if options.forwarded:
        conf["forwarded"] = "true"
    conf.update(options.tls)
    return [
        *(sys.executable, "-m", "unicron_lightning.node.launch"),
        *("--rdzv-backend", "unicron", "--rdzv-endpoint", options.endpoint, "--rdzv-id", job.name),
        *("--rdzv-conf", ",".join(f"{key}={value}" for key, value in conf.items())),
        *("--nnodes", f"{job.min_nodes}:{job.max_nodes}", "--nproc-per-node", str(job.workers_per_node)),
        *("--max-restarts", str(job.max_restarts)),
        *(("--local-addr", options.local_addr) if options.local_addr else ()),
        *job.command,
    ]


def torchrun_environment(
    launch: Launch, options: NodeOptions, pipes: Path, inherited: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the environment of the process: the daemon's, the job's, and required values."""
    environment = {name: value for name, value in inherited.items() if name not in environ.FROM_AGENT}
    environment.setdefault("PYTHONUNBUFFERED", "1")  # otherwise a log is pages behind
    environment.update(launch.job.environment)
    devices = next(slot.devices for slot in options.slots if slot.label == launch.slot)
    if devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = devices
    environment.pop(environ.TOKEN, None)
    environment[DAEMON_PID], environment[PIPES] = str(os.getpid()), str(pipes)
    return environment
