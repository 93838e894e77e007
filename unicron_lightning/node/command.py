"""The command line and environment by which a daemon starts torchrun."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from unicron_lightning import environ
from unicron_lightning.jobs import FROM_FILE, FROM_VARIABLE, Job
from unicron_lightning.node.launch import DAEMON_PID, PIPES
from unicron_lightning.node.options import NodeOptions, log_folder
from unicron_lightning.regular_files import open_regular
from unicron_lightning.wire.daemon import Launch

_CONNECT_SECONDS: Final = 900
_TOKEN_FILE: Final = "token"
_ACTIVATION_FILE: Final = "activate.sh"
_MOST_SECRET_BYTES: Final = 128 << 10


def hand_token(options: NodeOptions, scratch: Path) -> None:
    """Write the token to a file for torchrun alone: arguments are visible to all users, and workers inherit
    variables.
    """
    if options.token_file is None:
        path = scratch / _TOKEN_FILE
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
            file.write(options.token.secret)


def torchrun_command(launch: Launch, options: NodeOptions, scratch: Path) -> list[str]:
    """Return the arguments of the process, without the job's activation commands: see `activated`.

    Args:
        launch: the agent to run.
        options: the daemon's options.
        scratch: folder of this start, with the file of `hand_token`.

    Raises:
        ValueError: there is no such interpreter on this node.
    """
    job = launch.job
    conf = {"node": options.node, "slot": launch.slot, "weight": f"{job.weight!r}", "embedded": "false"}
    # The order to start has just arrived: an absent coordinator is being restarted.
    conf["connect_timeout"] = f"{_CONNECT_SECONDS}"
    conf["token_file"] = str(options.token_file or scratch / _TOKEN_FILE)
    if options.rack is not None:
        conf["rack"] = options.rack
    if options.forwarded:
        conf["forwarded"] = "true"
    conf.update(options.tls)
    return [
        *(_interpreter(job), "-m", "unicron_lightning.node.launch"),
        *("--rdzv-backend", "unicron", "--rdzv-endpoint", options.endpoint, "--rdzv-id", job.name),
        *("--rdzv-conf", ",".join(f"{key}={value}" for key, value in conf.items())),
        *("--nnodes", f"{job.min_nodes}:{job.max_nodes}", "--nproc-per-node", str(job.workers_per_node)),
        *("--max-restarts", str(job.max_restarts)),
        *(("--local-addr", options.local_addr) if options.local_addr else ()),
        *job.command,
    ]


def activated(job: Job, command: Sequence[str], scratch: Path) -> list[str]:
    """Return arguments that run the job's activation commands in bash and then become ``command``, in one process.

    Args:
        job: the job; without activation commands ``command`` is returned unchanged.
        command: arguments of the process.
        scratch: folder of this start, which gets the shell's script: arguments are limited in length.
    """
    if not job.activate:
        return list(command)
    lines = []
    for each in job.activate:
        message = shlex.quote(f"unicron: activate: {each}: ended with status")
        lines.append(f'{{ {each}\n}} || {{ code=$?; echo {message} "$code" >&2; exit "$code"; }}')
    path = scratch / _ACTIVATION_FILE
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
        file.write("\n".join([*lines, f"exec {shlex.join(command)}", ""]))
    return ["bash", str(path)]


def torchrun_environment(
    launch: Launch, options: NodeOptions, pipes: Path, inherited: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the environment of the process: the daemon's, the job's, its secrets, and required values.

    Raises:
        ValueError: a secret cannot be read; the message names its source only.
    """
    job = launch.job
    environment = {name: value for name, value in inherited.items() if name not in environ.FROM_AGENT}
    environment.setdefault("PYTHONUNBUFFERED", "1")  # otherwise a log is pages behind
    if (home := _virtual_environment(job)) is not None:
        environment["VIRTUAL_ENV"] = str(home)
        environment["PATH"] = os.pathsep.join([str(home / "bin"), *filter(None, [environment.get("PATH")])])
    environment.update(job.environment)
    for name, source in job.secrets.items():
        environment[name] = _secret(name, source, inherited)
        if options.token.secret in environment[name]:
            raise ValueError(f"secrets.{name}={source}: it holds the token, which no job gets; expected another secret")
    devices = next(slot.devices for slot in options.slots if slot.label == launch.slot)
    if devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = devices
    environment.pop(environ.TOKEN, None)
    environment[DAEMON_PID], environment[PIPES] = str(os.getpid()), str(pipes)
    environment[environ.LOGS] = str(log_folder(options.logs, job.name, options.node, launch.slot).absolute())
    return environment


def _virtual_environment(job: Job) -> Path | None:
    """Return the folder that the job names as its Python; None if it names an interpreter, or none."""
    return Path(job.python) if job.python is not None and "/" in job.python and Path(job.python).is_dir() else None


def _interpreter(job: Job) -> str:
    if job.python is None or "/" not in job.python:
        return job.python or sys.executable
    home = _virtual_environment(job)
    path = Path(job.python) if home is None else home / "bin" / "python"
    if not os.access(path, os.X_OK):
        raise ValueError(f"python={job.python}: expected an interpreter or a virtual environment; {path} is none")
    return str(path)


def _secret(name: str, source: str, inherited: Mapping[str, str]) -> str:
    if source.startswith(FROM_VARIABLE):
        value = inherited.get(source.removeprefix(FROM_VARIABLE))
        if value is None:
            raise ValueError(f"secrets.{name}={source}: expected this variable in the daemon's environment")
        return value
    try:
        with open(source.removeprefix(FROM_FILE), "rb", opener=open_regular) as file:
            content = file.read(_MOST_SECRET_BYTES + 1)
        value = content.decode().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ValueError(f"secrets.{name}={source}: expected a readable text file: {reason}") from None
    if len(content) > _MOST_SECRET_BYTES or "\0" in value:
        raise ValueError(f"secrets.{name}={source}: expected up to {_MOST_SECRET_BYTES} bytes and no null character")
    return value
