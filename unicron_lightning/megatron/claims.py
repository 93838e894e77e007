"""Which shard a worker takes that joins: the members say which are lacking, and each is claimed once."""

from __future__ import annotations

import json
import logging
import time
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from unicron_lightning.worker.control import Control

logger = logging.getLogger(__name__)

LACKING: Final = "megatron/lacking"
"""The record of what is lacking: the epoch, the shards, and where its store is."""
_CLAIM_TIMEOUT: Final = timedelta(seconds=10)
_POLL_SECONDS: Final = 0.05


def wait_lacking(control: Control) -> dict[str, Any] | None:
    """What the members have told last; they may not have told yet of the loss that this worker makes up for."""
    deadline = time.monotonic() + _CLAIM_TIMEOUT.total_seconds()
    while time.monotonic() < deadline:
        lacking: dict[str, Any] = json.loads(control.lookup(LACKING) or "{}")
        if lacking.get("shards"):
            return lacking
        time.sleep(_POLL_SECONDS)
    return None


def claim_shard(lacking: dict[str, Any], first: int) -> int:
    """A shard of those that are lacking, each claimed in the epoch's store as often as it is lacking.

    Args:
        lacking: as `GridFabric` has told.
        first: wanted before others.

    Returns:
        If all are claimed (by one that has died since, maybe), or the store's agent has just died: any.
    """
    shards: list[int] = lacking["shards"]
    wanted = [shard for shard in (first, *shards) if shard in shards]
    prefix = f"{LACKING}/{lacking['epoch']}/{lacking['key']}"
    try:
        store = dist.TCPStore(lacking["host"], lacking["port"], is_master=False, timeout=_CLAIM_TIMEOUT)
        for shard in dict.fromkeys(wanted):
            if store.add(f"{prefix}/{shard}", 1) <= shards.count(shard):
                return shard
    except (RuntimeError, OSError) as error:
        logger.warning("shard_not_claimed error=%s", error)
    return wanted[0]
