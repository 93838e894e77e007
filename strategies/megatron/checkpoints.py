"""Checkpoints of the Megatron strategy: operations of all members, so that they survive failures."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from torch import Tensor

from unicron_lightning.checkpoints.staging import HeldCheckpoint
from unicron_lightning.megatron import checkpoint
from unicron_lightning.megatron.grid import Shape
from unicron_lightning.megatron.held import held_checkpoint
from unicron_lightning.megatron.model import ShardModel
from unicron_lightning.megatron.object_codes import authenticated
from unicron_lightning.replica.fabric import run_released
from unicron_lightning.replica.member import ReplicaMember
from unicron_lightning.replica.mirror import Stored
from unicron_lightning.strategies.parallelism import CheckpointStore
from unicron_lightning.worker.checkpoint_files import located, total
from unicron_lightning.worker.communication.communicator import gather_bytes
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.operations import Indivisible

if TYPE_CHECKING:
    from unicron_lightning.strategies.megatron.parallel import MegatronParallel

logger = logging.getLogger(__name__)


class _OfAll(Indivisible):
    """What all workers do together with a checkpoint; repeated as a whole if one dies meanwhile.

    The result is the digest of all files written.

    Args:
        member: this worker's connections and shard; spares do not take part.
        path: the checkpoint's folder.
    """

    name = ""

    def __init__(self, member: ReplicaMember[Shape, ShardModel], path: str) -> None:
        self._member = member
        self._fabric = member.fabric
        self._model = member.model
        self._path = path

    def attempt(self, engine: Engine) -> bytes:
        digests = {} if self._fabric.channels is None else self._act(engine)
        for part in gather_bytes(engine.communicator, msgspec.json.encode(digests), engine.tag(self.name)):
            digests.update(msgspec.json.decode(part, type=dict[str, str]))
        return total(digests).encode()

    def _act(self, engine: Engine) -> dict[str, str]:
        """Do this worker's part; return the digests of the files that it has written, by name."""
        raise NotImplementedError


class SaveCheckpoint(_OfAll):
    """Writes the parts of all active workers.

    Args:
        member, path: as for `_OfAll`.
        rest: Lightning's part.
    """

    name = "save_checkpoint"

    def __init__(self, member: ReplicaMember[Shape, ShardModel], path: str, rest: dict[str, Any]) -> None:
        super().__init__(member, path)
        self._rest = rest

    def _act(self, engine: Engine) -> dict[str, str]:
        engine.fault("checkpoint", engine.step)
        chunks, optimizer = [self._model.ddp], self._model.optimizer
        with self._member.connected(), authenticated(self._fabric.epoch_key):
            digests: dict[str, str] = run_released(lambda: checkpoint.save(self._path, chunks, optimizer, self._rest))
        return digests


class LoadCheckpoint(_OfAll):
    """Reads the parts of all active workers, whatever layout wrote them; spares receive theirs from workers later.

    Args:
        member, path: as for `_OfAll`.
        step: optimizer steps done in it.
    """

    name = "load_checkpoint"

    def __init__(self, member: ReplicaMember[Shape, ShardModel], path: str, step: int) -> None:
        super().__init__(member, path)
        self._step = step

    def _act(self, engine: Engine) -> dict[str, str]:
        with authenticated(self._fabric.epoch_key):
            run_released(lambda: checkpoint.load(self._path, [self._model.ddp], self._model.optimizer))
        if self._model.keeper is not None:
            self._model.keeper.replace(self._step)
        return {}

    def attempt(self, engine: Engine) -> bytes:
        result = super().attempt(engine)
        if self._fabric.channels is not None:
            self._fabric.at = self._step
        return result


class GridCheckpoints(CheckpointStore):
    """Folders in Megatron's format, written by all workers.

    Args:
        grid: the parallelism that they belong to.
    """

    restores_late = True  # Megatron's optimizer has to exist
    divided = True
    at_urls = False

    def __init__(self, grid: MegatronParallel) -> None:
        self._grid = grid
        self._resumes: str | None = None

    def module_state(self, state: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return an empty state: see `save`."""
        return {}

    def save(self, checkpoint: dict[str, Any], filepath: Any, options: Any) -> str | None:
        """Write a folder in Megatron's format, with all workers (`unicron_lightning.megatron.checkpoint`)."""
        path = located(filepath)
        if self._grid.strategy.collectives.interrupted():
            logger.warning("checkpoint_left_out path=%s reason=interrupted, and it needs all workers", path)
            return None
        member = self._grid.member
        digest = self._grid.strategy.engine.run(SaveCheckpoint(member, path, checkpoint))
        self.written(int(checkpoint["global_step"]))
        return digest.decode()

    def held_parts(self) -> Sequence[str]:
        """Name this worker's shard and, with the distributed optimizer, its ranges of the state and copies of others'.

        The ranges are named by all that determines them. Nothing is named by a spare.
        """
        return [*self._copies(), *self._shard()]

    def _shard(self) -> list[str]:
        place, fabric = self._grid.member.fabric.place, self._grid.member.fabric
        return [] if place is None or place.replica is None else [str(fabric.own_shard)]

    def _copies(self) -> dict[str, Stored]:
        """Return ranges of the optimizer's state by the names of their parts: this worker's own first."""
        keeper, fabric, shard = self._grid.member.model.keeper, self._grid.member.fabric, self._shard()
        if keeper is None or not shard:
            return {}
        assert fabric.at is not None
        copies, size = keeper.copies(fabric.at), keeper.replicas
        return {f"{shard[0]} optimizer {owner}/{size}": copy for owner, copy in copies.items()}

    def held(self, checkpoint: dict[str, Any]) -> HeldCheckpoint:
        model, shard = self._grid.member.model, self._shard()
        if not shard:
            return HeldCheckpoint(tensors={}, files={})
        copies = None if model.keeper is None else self._copies()
        if copies is not None and not copies:
            raise LookupError(f"no copy of this worker's ranges after {self._grid.member.fabric.at} steps")
        return held_checkpoint(model.ddp, model.optimizer, checkpoint, shard[0], copies)

    def steady(self) -> Iterator[Tensor]:
        yield from self._grid.member.model.kept()
        yield from (copy.data for copy in self._copies().values())

    def written(self, step: int) -> None:
        keeper = self._grid.member.model.keeper
        if keeper is not None:
            keeper.saved = step

    def load(self, path: Any, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Load Lightning's part; `load_model` reads the model's once it exists."""
        folder = str(Path(str(path)).absolute())
        rest = checkpoint.rest(folder)
        self._resumes = folder
        return rest

    def load_model(self, checkpoint: Any, load: Callable[[], None]) -> None:
        """Load model and optimizer of the path given to `load`, if any; joiners call this, too."""
        path, self._resumes = self._resumes, None
        if path is not None:
            member = self._grid.member
            self._grid.strategy.engine.run(LoadCheckpoint(member, path, int(checkpoint["global_step"])))
