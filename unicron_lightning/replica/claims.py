"""Choice of a joiner's shard: the members publish the missing shards, and each of them is claimed once."""

from __future__ import annotations

import json
import logging
import time
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from unicron_lightning.worker.control.thread import Control

logger = logging.getLogger(__name__)

LACKING: Final = "replica/lacking"
"""Key of the record of missing shards: the epoch, the shards, and the address of the epoch's store."""
_CLAIM_TIMEOUT: Final = timedelta(seconds=10)
_POLL_SECONDS: Final = 0.05


def wait_lacking(control: Control) -> dict[str, Any] | None:
    """Wait for a record with missing shards; the members may not have published the loss that this worker
    replaces yet.
    """
    deadline = time.monotonic() + _CLAIM_TIMEOUT.total_seconds()
    while time.monotonic() < deadline:
        lacking: dict[str, Any] = json.loads(control.lookup(LACKING) or "{}")
        if lacking.get("shards"):
            return lacking
        time.sleep(_POLL_SECONDS)
    return None


def claim_shard(lacking: dict[str, Any], first: int) -> int:
    """Claim a missing shard in the epoch's store, each as often as it is missing.

    Args:
        lacking: record published by `ReplicaFabric`.
        first: preferred shard.

    Returns:
        The claimed shard; any missing one if all are claimed (perhaps by workers that have died since), or if the
        store's agent has died.
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
