"""Task definitions, valid before a task runs and while it runs. Submitted by users and sent to the nodes' daemons."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields
from pathlib import PurePosixPath
from typing import Final

import msgspec

from unicron_lightning.errors import ConfigError
from unicron_lightning.wire.fields import MOST_WEIGHT, shortened

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
MOST_NODES: Final = 1_000_000
MOST_WORKERS: Final = 1024
"""Limit for a slot: each worker is a process with its own log."""
_MOST_RESTARTS: Final = 2**31 - 1
_MOST_TEXT_BYTES: Final = 128 << 10
"""Limit for one argument or variable: Linux' MAX_ARG_STRLEN."""
_MOST_BYTES: Final = 1 << 20
"""Limit for all arguments and variables together: half of Linux' default limit."""
_MOST_PATH_BYTES: Final = 4096


@dataclass(kw_only=True)
class JobShare:
    """A job's part of the cluster, as configured. Not frozen, nor are its subclasses: Hydra overrides their values."""

    weight: float = 1.0
    """Weight of its FLOPs relative to other tasks."""
    min_nodes: int = 1
    """Fewest slots with which it may run."""
    max_nodes: int = 1
    """Most slots that it may have."""
    workers_per_node: int = 1
    """Workers in a slot."""
    max_restarts: int = 1000
    """Restarts of its workers that each of its agents allows."""


@dataclass(kw_only=True)
class JobFields(JobShare):
    """All that a user configures of a job but its name. Fields as in `Job`."""

    command: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    folder: str | None = None
    flops_per_step: float | None = None
    profile: dict[int, float] = field(default_factory=dict)

    def job(self, name: str) -> Job:
        """Return the definition under this name.

        Raises:
            ConfigError: it is wrong.
        """
        job = Job(name=name, **{each.name: getattr(self, each.name) for each in fields(JobFields)})
        wrong = problem(job)
        if wrong is not None:
            raise ConfigError(wrong)
        return job


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A task as it was submitted; its name is the task's id (torchrun's ``--rdzv-id``)."""

    name: str
    command: list[str]
    """The script and its arguments, as they would follow torchrun's own."""
    environment: dict[str, str] = {}
    """Added to the environment of its processes."""
    folder: str | None = None
    """Working directory of its processes, an absolute path; None: that of the node's daemon."""
    weight: float = 1.0
    """w(t), the value of its FLOPs relative to those of other tasks."""
    min_nodes: int = 1
    """Fewest slots with which the task may run."""
    max_nodes: int = 1
    """Most slots that the task may have."""
    workers_per_node: int = 1
    """Workers in a slot: torchrun's ``--nproc-per-node``."""
    max_restarts: int = 1000
    """Restarts that torchrun allows each of its agents."""
    flops_per_step: float | None = None
    """FLOPs of the model in one optimizer step, used to compute FLOP/s from step times."""
    profile: dict[int, float] = {}
    """T(t,x) if known beforehand: achieved FLOP/s by number of slots."""
    submitted_at: float = 0.0
    """time.time() of its submission, set by the coordinator: orders the queue, and distinguishes jobs of the
    same name.
    """


def problem(job: Job) -> str | None:
    """The error in a definition, in one sentence that quotes it; None if the definition is valid."""
    low, high = job.min_nodes, job.max_nodes
    if not _NAME.fullmatch(job.name):
        allowed = "up to 100 letters, digits, '.', '_' or '-', beginning with a letter or digit"
        return f"name={shortened(job.name)}: expected {allowed}"
    if not job.command or not job.command[0]:
        return f"command={shortened(job.command)}: expected the script and its arguments"
    if not 1 <= low <= high <= MOST_NODES:
        nodes = f"min_nodes={shortened(low)}, max_nodes={shortened(high)}"
        return f"{nodes}: expected 1 <= min_nodes <= max_nodes <= {MOST_NODES}"
    if not 1 <= job.workers_per_node <= MOST_WORKERS:
        return f"workers_per_node={shortened(job.workers_per_node)}: expected a number >= 1 and <= {MOST_WORKERS}"
    if not 0 <= job.max_restarts <= _MOST_RESTARTS:
        return f"max_restarts={shortened(job.max_restarts)}: expected a number >= 0 and <= {_MOST_RESTARTS}"
    if not _positive(job.weight) or job.weight > MOST_WEIGHT:
        return f"weight={job.weight}: expected a number > 0 and <= {MOST_WEIGHT:g}"
    return _problem_of_numbers(job) or _problem_of_texts(job)


def _problem_of_numbers(job: Job) -> str | None:
    if job.flops_per_step is not None and not _positive(job.flops_per_step):
        return f"flops_per_step={job.flops_per_step}: expected a number > 0"
    for slots, flops in job.profile.items():
        if not 1 <= slots <= MOST_NODES or not _positive(flops):
            return f"profile={shortened(job.profile)}: expected FLOP/s > 0 by numbers of slots >= 1"
    return None


def _problem_of_texts(job: Job) -> str | None:
    """The reason why no process could be started with these arguments, variables and folder."""
    if job.folder is not None:
        wrong = _unusable(job.folder, _MOST_PATH_BYTES)
        if wrong is not None or not PurePosixPath(job.folder).is_absolute():
            return f"folder={shortened(job.folder)}: {wrong or 'expected an absolute path'}"
    for word in job.command:
        if (wrong := _unusable(word, _MOST_TEXT_BYTES)) is not None:
            return f"command: {shortened(word)}: {wrong}"
    for key, value in job.environment.items():
        wrong = _unusable(f"{key}={value}", _MOST_TEXT_BYTES)
        if not key or "=" in key or wrong is not None:
            why = "" if wrong is None else f": {wrong}"
            return f"environment: {shortened(key)}={shortened(value)} can't be a variable{why}"
    size = sum(len(text) + 9 for text in (*job.command, *job.environment, *job.environment.values()))
    if size > _MOST_BYTES:
        return f"command and environment have {size} characters: expected <= {_MOST_BYTES}"
    return None


def _unusable(text: str, most: int) -> str | None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        return "expected characters that UTF-8 has"
    if "\0" in text:
        return "expected no null character"
    return None if size <= most else f"{size} bytes: expected <= {most}"


def _positive(value: float) -> bool:
    return math.isfinite(value) and value > 0
