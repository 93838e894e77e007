"""Checks that Megatron's live objects have the private names on which this package depends."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import TYPE_CHECKING, Any

import plain
import torch.distributed as dist

from unicron_lightning.megatron import shim, toy

if TYPE_CHECKING:
    from pathlib import Path


def missing(rank: int, world: int, folder: Path, *, names: dict[str, list[str]]) -> list[str]:
    """Scenario: ``OWNER.NAME`` of each name that its owner lacks.

    Args:
        names: by owner: a module, ``CLASS()`` for the arguments of its constructor, or one of `_live`.
    """
    shim.install()
    plain.start(rank, world, folder)
    live = _live(plain.build(toy.Toy(), zero1=True, overlap_grad_reduce=True))
    found = []
    for owner, wanted in names.items():
        has = _names_of(owner, live)
        found += [f"{owner}.{name}" for name in wanted if name not in has]
    dist.destroy_process_group()
    return found


def _live(training: plain.Training) -> dict[str, Any]:
    group = training.ddp.bucket_groups[0]
    optimizer = training.optimizer.chained_optimizers[0]
    return {
        "DistributedDataParallel": training.ddp,
        "bucket group": group,
        "bucket": group.buckets[0],
        "buffer": training.ddp.buffers[0],
        "ChainedOptimizer": training.optimizer,
        "DistributedOptimizer": optimizer,
    }


def _names_of(owner: str, live: dict[str, Any]) -> set[str]:
    if owner.endswith("()"):
        return set(inspect.signature(type(live[owner[:-2]])).parameters)
    return set(dir(live[owner] if owner in live else import_module(owner)))
