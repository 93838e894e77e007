"""Scenario: ranks exchange objects, one of them without the epoch's key."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import plain
import torch.distributed as dist

from unicron_lightning.megatron.object_codes import UnprovenObject, authenticated


class Trap:
    """Notes the process in which it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return _spring, (self.path,)


def _spring(path: str) -> None:
    (Path(path) / f"{os.getpid()}").touch()


def _gather(obj: Any) -> Any:
    found: list[Any] | None = [None, None] if dist.get_rank() == 0 else None
    dist.gather_object(obj, found, dst=0)
    return None if found is None else found[1]


def _all_gather(obj: Any) -> Any:
    found: list[Any] = [None, None]
    dist.all_gather_object(found, obj)
    return found[1]


def _broadcast(obj: Any) -> Any:
    found = [obj]
    dist.broadcast_object_list(found, src=1)
    return found[0]


def _scatter(obj: Any) -> Any:
    found: list[Any] = [None]
    dist.scatter_object_list(found, [obj, "own"] if dist.get_rank() == 1 else None, src=1)
    return found[0]


EXCHANGES = (_gather, _all_gather, _broadcast, _scatter)


def exchange(rank: int, world: int, folder: Path, *, keys: list[str | None], trap: str) -> list[str]:
    """Exchange an object of rank 1 by each collective; return what rank 0 receives, or the errors, and the process.

    Args:
        rank, world, folder: of the scenario.
        keys: of each rank; None: it exchanges objects as plain torch does.
        trap: folder in which each process that unpickles rank 1's object makes a file; empty: a plain object.
    """
    plain.start(rank, world, folder)
    obj: Any = {"rank": rank, "large": "x" * 1000}
    if rank == 1 and trap:
        obj = Trap(trap)
    results = []
    for collective in EXCHANGES:
        key = keys[rank]
        try:
            with nullcontext() if key is None else authenticated(key):
                found = collective(obj)
            results.append(repr(found)[:11])
        except UnprovenObject as error:
            results.append(str(error))
    dist.destroy_process_group()
    return [*results, str(os.getpid())]
