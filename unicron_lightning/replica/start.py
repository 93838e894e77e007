"""The state of shards at the start, of workers that replace others, and of spares at the end."""

from __future__ import annotations

import json
from typing import Any, Final

import torch

from unicron_lightning.replica.channels import Channels
from unicron_lightning.replica.fabric import ReplicaFabric, run_released
from unicron_lightning.replica.model import ReplicaModel
from unicron_lightning.worker.communication.communicator import broadcast_bytes, gather_bytes
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.operations import Indivisible

_PIECE_BYTES: Final = 1 << 26
"""Bytes that a worker holds of another shard's state."""


class ShardOperation(Indivisible):
    """An operation in which all workers do the same with their shards.

    Args:
        fabric: provides this worker's place and progress.
        model: its shard.
    """

    def __init__(self, fabric: ReplicaFabric[Any], model: ReplicaModel) -> None:
        self._fabric = fabric
        self._model = model


class InitialState(ShardOperation):
    """All replicas start from the first one's parameters."""

    name = "initial_state"

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


class LastState(ShardOperation):
    """At the end of a fit, workers with an older state of their shard, as spares have, receive the newest.

    It goes through all members, since a spare has no connections of its own. No member leaves before all have theirs.
    """

    name = "last_state"

    def attempt(self, engine: Engine) -> bytes:
        communicator, own = engine.communicator, [self._fabric.own_shard, self._fabric.at]
        words = gather_bytes(communicator, json.dumps(own).encode(), engine.tag(self.name))
        held: list[list[int | None]] = [json.loads(word) for word in words]
        newest = max(at for _, at in held if at is not None)
        lacking = {shard for shard, at in held if at != newest}
        for shard in range(self._fabric.shape.shards):
            if shard in lacking:
                self._send(engine, shard, newest, held.index([shard, newest]))
        if lacking:
            gather_bytes(communicator, b"", engine.tag(self.name))
        return b""

    def _send(self, engine: Engine, shard: int, newest: int, source: int) -> None:
        """Send the state of a shard from a rank to those that lack it."""
        fabric, communicator = self._fabric, engine.communicator
        sends, takes = communicator.rank == source, fabric.own_shard == shard and fabric.at != newest
        data = self._model.state() if sends else b""
        size = int(broadcast_bytes(communicator, str(len(data)).encode() if sends else None, source))
        received = bytearray()
        for start in range(0, size, _PIECE_BYTES):
            piece = broadcast_bytes(communicator, data[start : start + _PIECE_BYTES] if sends else None, source)
            if takes:
                received += piece
        if takes:
            self._model.load_state(bytes(received))
            fabric.at = newest


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
