"""Registration of the `DefaultGroup` with torch, and what of Lightning must not take it for one of ddp's.

torch keeps its groups in private tables. Where a version of torch lacks one of them, nothing is registered, and
`torch.distributed.is_initialized()` stays false.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import lightning.pytorch as pl
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from lightning.pytorch.core.optimizer import do_nothing_closure
from torch import nn
from torchmetrics import Metric
from torchmetrics.metric import jit_distributed_available

from unicron_lightning.strategies.collectives.operations import Collectives
from unicron_lightning.strategies.collectives.process_group import NAME, DefaultGroup, NoStore, RankAndSize

logger = logging.getLogger(__name__)

_TABLES: Final = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg")
_FUNCTIONS: Final = ("_update_default_pg", "_register_process_group", "_unregister_process_group")

_SEEN: Final = f"{NAME}_seen"
"""Name of a group that is torch's default while a stream is read."""
_group: DefaultGroup | None = None


def supported() -> bool:
    """Tell whether this version of torch has the tables and functions that a registration needs."""
    tables = all(hasattr(getattr(c10d, "_world", None), name) for name in _TABLES)
    return dist.is_available() and tables and all(hasattr(c10d, name) for name in _FUNCTIONS)


def register(place: RankAndSize, collectives: Collectives) -> None:
    """Make the present members torch's default process group, unless the script has initialised one of its own."""
    global _group
    if _group is not None and c10d.GroupMember.WORLD is _group:
        _group.place, _group.collectives = place, collectives
        follow()
        return
    if dist.is_initialized() or not supported():
        logger.warning("default_group_not_registered initialized=%s supported=%s", dist.is_initialized(), supported())
        return
    _group = group = DefaultGroup(place)
    group.collectives = collectives
    world: Any = c10d._world
    world.pg_map[group] = (NAME, NoStore())
    world.pg_names[group] = NAME
    world.pg_backend_config[group] = f"cpu:{NAME}"
    world.pg_to_tag[group] = "default"
    world.tags_to_pg.setdefault("default", []).append(group)
    world.tags_to_pg.setdefault("", []).append(group)
    c10d._register_process_group(NAME, group)  # type: ignore[arg-type]
    c10d._update_default_pg(group)
    follow()


def follow() -> None:
    """Take over the rank and the size of a new epoch; called after each change."""
    group = _group
    if group is not None and c10d.GroupMember.WORLD is group:
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(group.size())}
        c10d._update_default_pg(group)


def unregister() -> None:
    """Remove the group from torch, if it is there."""
    global _group
    group, _group = _group, None
    if group is None or group not in c10d._world.pg_map:
        return  # the script has called destroy_process_group()
    world: Any = c10d._world
    if c10d.GroupMember.WORLD is group:
        c10d._update_default_pg(None)
    for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag):
        table.pop(group, None)
    for tagged in world.tags_to_pg.values():
        if group in tagged:
            tagged.remove(group)
    c10d._unregister_process_group(NAME)  # type: ignore[arg-type]


@contextmanager
def seen(place: RankAndSize) -> Iterator[None]:
    """Inside, torch has a default group with a rank and a size, whose collectives are refused, unless the members are
    its default group anyway.
    """
    before = c10d.GroupMember.WORLD
    if (before is not None and before is _group) or not supported():
        yield
        return
    world: Any = c10d._world
    group = DefaultGroup(place)
    world.pg_map[group], world.pg_names[group] = (NAME, NoStore()), _SEEN
    world.pg_group_ranks[group] = {rank: rank for rank in range(group.size())}
    c10d._update_default_pg(group)
    try:
        yield
    finally:
        c10d._update_default_pg(before)
        for table in (world.pg_map, world.pg_names, world.pg_group_ranks):
            table.pop(group)


@contextmanager
def hidden() -> Iterator[None]:
    """Inside, torch has no default group."""
    group = _group
    if group is None or c10d.GroupMember.WORLD is not group:
        yield
        return
    c10d._update_default_pg(None)
    try:
        yield
    finally:
        c10d._update_default_pg(group)


def keep_lightning_out(trainer: pl.Trainer) -> None:
    """Keep Lightning from collectives that it runs by itself where there is a default group.

    It broadcasts whether a SIGTERM has come, in each step and in the signal's handler; the coordinator decides when
    workers leave. It makes a group of gloo's around `prepare_data`, which members and joiners do not run together.
    """
    signals, data, loop = trainer._signal_connector, trainer._data_connector, trainer.fit_loop.epoch_loop
    if "prepare_data" in vars(data):
        return
    data.prepare_data = partial(_hiding, data.prepare_data)  # type: ignore[method-assign]
    signals._sigterm_notifier_fn = partial(_hiding, signals._sigterm_notifier_fn)  # type: ignore[method-assign]
    loop._broadcast_sigterm_tensor = do_nothing_closure  # type: ignore[method-assign]


def _hiding(function: Callable[..., None], *args: Any) -> None:
    with hidden():
        function(*args)


def never() -> bool:
    """Answer for torchmetrics: nothing is synchronised over the default group."""
    return False


def own_metrics(module: nn.Module) -> None:
    """Keep torchmetrics from synchronising the module's metrics: the strategy merges their states already."""
    for child in module.modules():
        if isinstance(child, Metric) and child.distributed_available_fn is jit_distributed_available:
            child.distributed_available_fn = never
