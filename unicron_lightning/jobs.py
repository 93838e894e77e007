"""Task definitions: what a task is, before and while it runs. Submitted by users, told to the nodes' daemons."""

from __future__ import annotations

import math
import re
from pathlib import PurePosixPath
from typing import Final

import msgspec

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A task as it was submitted; its name is the task's id (torchrun's ``--rdzv-id``)."""

    name: str
    command: list[str]
    """The script and its arguments, as they would follow torchrun's own."""
    environment: dict[str, str] = {}
    """Added to the environment of its processes."""
    folder: str | None = None
    """Where its processes run, an absolute path; None: where the node's daemon does."""
    weight: float = 1.0
    """w(t), what its FLOPs are worth beside those of other tasks."""
    min_nodes: int = 1
    """Fewest slots with which it may run."""
    max_nodes: int = 1
    """Most slots that it may have."""
    workers_per_node: int = 1
    """Workers in a slot: torchrun's ``--nproc-per-node``."""
    max_restarts: int = 1000
    """Restarts that torchrun allows each of its agents."""
    flops_per_step: float | None = None
    """FLOPs of the model in one optimizer step, to make FLOP/s of measured steps."""
    profile: dict[int, float] = {}
    """T(t,x) where it is known beforehand: achieved FLOP/s by number of slots."""
    submitted_at: float = 0.0
    """time.time() of its submission, set by the coordinator: the queue's order, and what tells a job from an
    earlier one of the same name."""


def problem(job: Job) -> str | None:
    """What is wrong with a definition, in one sentence that quotes it; None if nothing is."""
    low, high = job.min_nodes, job.max_nodes
    if not _NAME.fullmatch(job.name):
        return (
            f"name={job.name!r}: expected up to 100 letters, digits, '.', '_' or '-', beginning with a letter or digit"
        )
    if not job.command or not job.command[0]:
        return f"command={job.command!r}: expected the script and its arguments"
    if not 1 <= low <= high:
        return f"min_nodes={low}, max_nodes={high}: expected 1 <= min_nodes <= max_nodes"
    if job.workers_per_node < 1:
        return f"workers_per_node={job.workers_per_node}: expected a number >= 1"
    if job.max_restarts < 0:
        return f"max_restarts={job.max_restarts}: expected a number >= 0"
    if not _positive(job.weight):
        return f"weight={job.weight}: expected a number > 0"
    if job.flops_per_step is not None and not _positive(job.flops_per_step):
        return f"flops_per_step={job.flops_per_step}: expected a number > 0"
    for slots, flops in job.profile.items():
        if slots < 1 or not _positive(flops):
            return f"profile={job.profile}: expected FLOP/s > 0 by numbers of slots >= 1"
    if job.folder is not None and not PurePosixPath(job.folder).is_absolute():
        return f"folder={job.folder!r}: expected an absolute path"
    for key, value in job.environment.items():
        if not key or "=" in key or "\0" in key + value:
            return f"environment: {key!r}={value!r} can't be a variable"
    return None


def _positive(value: float) -> bool:
    return math.isfinite(value) and value > 0
