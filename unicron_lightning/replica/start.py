"""The state of shards at the start, and of workers that replace others."""

from __future__ import annotations

from typing import Any

import torch

from unicron_lightning.replica.channels import Channels
from unicron_lightning.replica.fabric import ReplicaFabric, run_released
from unicron_lightning.replica.model import ReplicaModel
from unicron_lightning.worker.communication.communicator import gather_bytes
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.operations import Indivisible
from unicron_lightning.worker.report_sum import ReportSum


class InitialState(Indivisible):
    """All replicas start from the first one's parameters.

    Args:
        fabric: provides this worker's place.
        model: its shard.
    """

    name = "initial_state"

    def __init__(self, fabric: ReplicaFabric[Any], model: ReplicaModel) -> None:
        self._fabric = fabric
        self._model = model

    def plan(self, reports: ReportSum, rank: int) -> None:
        """All ranks do the same."""

    def attempt(self, engine: Engine) -> bytes:
        channels, keeper = self._fabric.channels, self._model.keeper
        if channels is not None and keeper is not None:
            keeper.found(engine, channels)
        if channels is not None:
            run_released(self._model.unify)
        if channels is not None and keeper is not None:
            keeper.keep(0)
        gather_bytes(engine.communicator, b"", engine.tag(self.name))
        return b""


def transfer(fabric: ReplicaFabric[Any], model: ReplicaModel) -> None:
    """Send the newest state of a shard to the epoch's workers that lack it, from another replica.

    Raises:
        CommunicatorAborted: a member failed.
    """
    place, channels = fabric.place, fabric.channels
    assert place is not None
    layout = place.layout
    if channels is None or not any(layout.shards[rank] == fabric.shard for rank in layout.stale):
        return
    source, lacks = layout.sources[fabric.own_shard], place.rank in layout.stale
    if lacks:
        fabric.at = None
    data = run_released(lambda: send_shard(channels, model.state() if place.replica == source else None, source))
    if lacks:
        model.load_state(data)
        fabric.at = layout.newest


def send_shard(channels: Channels, data: bytes | None, source: int) -> bytes:
    """Send the bytes of the worker of this shard in one replica to those in all."""
    size = torch.tensor([0 if data is None else len(data)], dtype=torch.int64)
    channels.same_shard.broadcast(size, source)
    buffer = torch.empty(int(size), dtype=torch.uint8)
    if data is not None:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    channels.same_shard.broadcast(buffer, source)
    return buffer.numpy().tobytes()
