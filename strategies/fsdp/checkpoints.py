"""Checkpoints of a sharded model: Lightning's single file with whole tensors, or a folder with a file for each shard.

Any strategy and any S can load the file; the folder is read by any S, and by Lightning's ModelParallelStrategy. For
another number of shards it is always a folder, of which each worker writes and reads its own part.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unicron_lightning.checkpoints.files import is_folder, located
from unicron_lightning.checkpoints.index import read_rest
from unicron_lightning.checkpoints.pieces import HeldCheckpoint
from unicron_lightning.errors import ConfigError
from unicron_lightning.fsdp import folder
from unicron_lightning.fsdp.folder import load_optimizer, load_parameters, whole_optimizer, whole_parameters
from unicron_lightning.fsdp.mesh import reshard
from unicron_lightning.replica.member import next_version
from unicron_lightning.strategies.state.checkpointing import (
    SingleFileCheckpoints,
    left_out,
    rest_of,
    save_folder,
    write_checkpoint,
)
from unicron_lightning.worker.codec import unpack_parts
from unicron_lightning.worker.model_state import are_converted
from unicron_lightning.worker.operations import Agreement

if TYPE_CHECKING:
    from unicron_lightning.strategies.fsdp.parallel import FsdpParallel


class ShardedCheckpoints(SingleFileCheckpoints):
    """Writes the shards of one replica: its first worker collects them for a file, or each writes its own to a folder.

    Args:
        parallel: the parallelism that they belong to.
        folders: whether the script's checkpoints are folders; both kinds are read.
    """

    divided = True

    def __init__(self, parallel: FsdpParallel, *, folders: bool) -> None:
        super().__init__(parallel.strategy)
        self._parallel = parallel
        self._folders = folders
        self._opened: Path | None = None
        self._part: dict[str, Any] = {}
        """This worker's shards of the optimizer's state, of a folder that is not open any more when they are loaded."""

    def save(self, checkpoint: dict[str, Any], filepath: Any, options: Any) -> str | None:
        """Complete a checkpoint and write it; repeated by another replica if a worker dies meanwhile.

        Raises:
            ConfigError: a folder is to be written to a URL, or with options.
        """
        strategy, path = self._parallel.strategy, located(filepath)
        if left_out(strategy, path):
            return None
        if self._folders or strategy.engine.world.kind == "relayout":
            if options is not None or "://" in path:
                raise ConfigError(
                    f"checkpoint {path!r} with storage_options={options!r}: save_distributed_checkpoint=True writes "
                    "folders of a file system that all workers see; expected a local path, and no options"
                )
            return save_folder(strategy, checkpoint, path, self.held_parts, lambda: self.held(checkpoint))

        def write(states: Sequence[Any]) -> str:
            checkpoint["state_dict"] = whole_parameters(strategy.module, [state["tensors"] for state in states])
            if "optimizer_states" in checkpoint:
                own, optimizer = [state["optimizer"] for state in states], self._parallel.member.model.optimizer
                assert optimizer is not None
                checkpoint["optimizer_states"] = [whole_optimizer(own, optimizer)]
            digest = write_checkpoint(strategy.checkpoint_io, checkpoint, path, options)
            strategy.reported.leave_record(strategy.session, checkpoint, path, digest)
            return digest

        return strategy.engine.run(self._parallel.holder.writing(strategy.engine, write)).decode()

    def held_parts(self) -> Sequence[str]:
        """Return this worker's shard, if it is part of a replica."""
        place = self._parallel.member.fabric.place
        return () if place is None or place.replica is None else (str(self._parallel.shard),)

    def held(self, checkpoint: dict[str, Any]) -> HeldCheckpoint:
        model = self._parallel.member.model
        reshard(model.root)
        optimizers = [model.optimizer] if model.optimizer is not None and "optimizer_states" in checkpoint else []
        return folder.held_part(model.root, optimizers, self._parallel.shard, rest_of(checkpoint))

    def load(self, path: Any, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return a file's content, or the part of a folder's that is not model or optimizer."""
        self._opened = None
        if "://" in str(path) or not Path(path).is_dir():
            return super().load(path, read)
        if not is_folder(path):
            raise ConfigError(f"checkpoint {str(path)!r}: expected a file, or a folder with .metadata and meta.pt")
        self._opened = Path(path)

        found = read_rest(Path(path))
        trained: dict[str, Any] = {"optimizer_states": [{}]} if "lr_schedulers" in found else {}
        return self.converted({**found, "state_dict": {}, **trained})

    def load_model(self, checkpoint: Any, load: Callable[[], None]) -> None:
        """Take this worker's shards of whole tensors, or from the folder; a joiner's checkpoint has none."""
        module = self._parallel.strategy.module
        opened, self._opened, self._part = self._opened, None, {}
        if opened is not None:
            folder.load_module(opened, module)
            if "optimizer_states" in checkpoint and self._parallel.member.model.optimizer is not None:
                self._part = folder.read_optimizer_part(opened, module)
        elif checkpoint["state_dict"]:
            load_parameters(module, checkpoint["state_dict"])
        else:
            return
        member, engine = self._parallel.member, self._parallel.strategy.engine
        known = engine.run(Agreement("version of a checkpoint", lambda rank: json.dumps(member.fabric.at).encode()))
        member.fabric.at = next_version(unpack_parts(known), int(checkpoint["global_step"]))

    def load_optimizers(self, checkpoint: Any, load: Callable[[], None]) -> None:
        """Take this worker's shards of the optimizer's tensors."""
        [state] = checkpoint["optimizer_states"]
        optimizer, part, self._part = self._parallel.member.model.optimizer, self._part, {}
        if optimizer is None:
            return
        if part:
            folder.load_optimizer_part(part, self._parallel.strategy.module, optimizer)
        elif state:
            converted = are_converted(self._parallel.strategy.module, checkpoint["state_dict"])
            load_optimizer(optimizer, state, whole=True, converted=converted)
