"""Choice of a joiner's shard."""

from __future__ import annotations

import torch.distributed as dist

from unicron_lightning.replica.fabric import claim_shard


def test_each_lacking_shard_is_claimed_as_often_as_it_is_lacking() -> None:
    """Otherwise two workers that had the same shard before would form no replica."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    lacking = {"epoch": 3, "key": "k", "shards": [0, 1, 1], "host": "127.0.0.1", "port": store.port}
    assert [claim_shard(lacking, first) for first in (1, 1, 1)] == [1, 1, 0]
    assert claim_shard({**lacking, "epoch": 4}, 7) == 0, "a newer word, and a shard that nobody lacks"


def test_joiners_without_a_preferred_shard_complete_one_replica_after_another() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    lacking = {"epoch": 3, "key": "k", "shards": [1, 0, 1, 0, 1], "host": "127.0.0.1", "port": store.port}
    assert [claim_shard(lacking, first) for first in (None, None, 1, None, None)] == [1, 0, 1, 0, 1]
