"""Task definitions: what a task is, before and while it runs."""

from __future__ import annotations

import msgspec


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A task as it was submitted; its name is the task's id (torchrun's ``--rdzv-id``)."""

    name: str
    command: list[str]
    """The script and its arguments, as they would follow torchrun's own."""
    environment: dict[str, str] = {}
    """Added to the environment of its processes."""
    folder: str | None = None
    """Where its processes run; None: where the node's agent does."""
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
    """time.time() of its submission; the queue's order."""
