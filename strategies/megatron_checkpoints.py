"""Checkpoints of the Megatron strategy: operations of all members, so that they survive failures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from unicron_lightning.megatron import checkpoint
from unicron_lightning.megatron.model import ShardModel
from unicron_lightning.replica.fabric import ReplicaFabric, run_released
from unicron_lightning.worker.checkpoint_files import total
from unicron_lightning.worker.communication.communicator import gather_bytes
from unicron_lightning.worker.engine import Engine, Report
from unicron_lightning.worker.operations import Indivisible


class SaveCheckpoint(Indivisible):
    """Writes the parts of all active workers; repeated as a whole if one dies meanwhile. The result is the digest.

    Args:
        fabric: provides this worker's place; spares do not take part.
        model: its shard.
        path: the checkpoint's folder.
        rest: Lightning's part.
    """

    name = "save_checkpoint"

    def __init__(self, fabric: ReplicaFabric[Any], model: ShardModel, path: str, rest: dict[str, Any]) -> None:
        self._fabric = fabric
        self._model = model
        self._path = path
        self._rest = rest

    def plan(self, reports: Sequence[Report | None], rank: int) -> None:
        """Plan nothing: all workers do the same."""

    def attempt(self, engine: Engine) -> bytes:
        digests: dict[str, str] = {}
        if self._fabric.channels is not None:
            engine.fault("checkpoint", engine.step)
            chunks, optimizer = [self._model.ddp], self._model.optimizer
            run_released(lambda: digests.update(checkpoint.save(self._path, chunks, optimizer, self._rest)))
        parts = gather_bytes(engine.communicator, msgspec.json.encode(digests), engine.tag(self.name))
        for part in parts:
            digests.update(msgspec.json.decode(part, type=dict[str, str]))
        return total(digests).encode()


class LoadCheckpoint(Indivisible):
    """Reads the parts of all active workers, whatever layout wrote them; spares receive theirs from workers later.

    Args:
        fabric: provides this worker's place, and records its state.
        model: its shard.
        path: the checkpoint's folder.
        step: optimizer steps done in it.
    """

    name = "load_checkpoint"

    def __init__(self, fabric: ReplicaFabric[Any], model: ShardModel, path: str, step: int) -> None:
        self._fabric = fabric
        self._model = model
        self._path = path
        self._step = step

    def plan(self, reports: Sequence[Report | None], rank: int) -> None:
        """Plan nothing: all workers do the same."""

    def attempt(self, engine: Engine) -> bytes:
        if self._fabric.channels is not None:
            run_released(lambda: checkpoint.load(self._path, [self._model.ddp], self._model.optimizer))
            if self._model.keeper is not None:
                self._model.keeper.replace(self._step)
        gather_bytes(engine.communicator, b"", engine.tag(self.name))
        if self._fabric.channels is not None:
            self._fabric.at = self._step
        return b""
