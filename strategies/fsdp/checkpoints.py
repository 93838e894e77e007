"""Checkpoints of a sharded model: Lightning's single file with whole tensors, or a folder with a file for each shard.

Any strategy and any S can load the file; the folder is read by any S, and by Lightning's ModelParallelStrategy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from unicron_lightning.checkpoints.index import read_rest
from unicron_lightning.checkpoints.names import is_folder
from unicron_lightning.checkpoints.staging import HeldCheckpoint
from unicron_lightning.checkpoints.storage import FolderStorage
from unicron_lightning.errors import ConfigError
from unicron_lightning.fsdp import folder
from unicron_lightning.fsdp.mesh import reshard
from unicron_lightning.fsdp.whole import load_optimizer, load_parameters, whole_optimizer, whole_parameters
from unicron_lightning.replica.fabric import ReplicaFabric, run_released
from unicron_lightning.strategies.state.checkpointing import SingleFileCheckpoints, rest_of, write_checkpoint
from unicron_lightning.worker import codec
from unicron_lightning.worker.checkpoint_files import located, total
from unicron_lightning.worker.communication.communicator import gather_bytes
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.operations import Indivisible
from unicron_lightning.worker.report_sum import Report, ReportSum

if TYPE_CHECKING:
    from unicron_lightning.strategies.fsdp.parallel import FsdpParallel

logger = logging.getLogger(__name__)


class ShardedCheckpoints(SingleFileCheckpoints):
    """Writes the shards of one replica: its first worker collects them for a file, or each writes its own to a folder.

    Args:
        parallel: the parallelism that they belong to.
        folders: whether to write folders; both kinds are read.

    Attributes:
        loaded: whether a checkpoint has been loaded since the script's first ``fit`` began.
    """

    restores_late = True

    def __init__(self, parallel: FsdpParallel, *, folders: bool) -> None:
        super().__init__(parallel.strategy)
        self.divided = folders
        self._parallel = parallel
        self.loaded = False
        self._folders = folders
        self._opened: Path | None = None
        self._part: dict[str, Any] = {}
        """This worker's shards of the optimizer's state, of a folder that is not open any more when they are loaded."""

    def check_fit(self) -> None:
        """Refuse a further ``fit`` from a checkpoint, because versions of shards would repeat.

        Raises:
            ConfigError: a checkpoint has been loaded.
        """
        if self.loaded:
            raise ConfigError(
                "a further trainer.fit after a checkpoint has been loaded (ckpt_path): with unicron_fsdp it continues "
                "from the parameters of the fit before; expected no ckpt_path until the script's last fit has ended"
            )

    def module_state(self, state: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return an empty state: see `save`; joiners get their shards from another replica."""
        return {}

    def optimizer_state(self, optimizer: Optimizer, state: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return an empty state, as `module_state`."""
        return {}

    def save(self, checkpoint: dict[str, Any], filepath: Any, options: Any) -> str | None:
        """Complete a checkpoint and write it; repeated by another replica if a worker dies meanwhile.

        Raises:
            ConfigError: a folder is to be written to a URL, or with options.
        """
        strategy, path = self._parallel.strategy, located(filepath)
        if strategy.collectives.interrupted():
            logger.warning("checkpoint_left_out path=%s reason=interrupted, and it needs all workers", path)
            return None
        if not self._folders:
            return self._run(checkpoint, path, *self._file(checkpoint, path, options))
        if options is not None or "://" in path:
            raise ConfigError(
                f"checkpoint {path!r} with storage_options={options!r}: save_distributed_checkpoint=True writes "
                "folders of a file system that all workers see; expected a local path, and no options"
            )
        return self._run(checkpoint, path, *self._folder(checkpoint, Path(path)))

    def _run(
        self,
        checkpoint: dict[str, Any],
        path: str,
        collect: Callable[[], list[bytes]],
        write: Callable[[Sequence[bytes]], str],
    ) -> str:
        strategy = self._parallel.strategy

        def write_and_record(shards: Sequence[bytes]) -> str:
            digest = write(shards)
            strategy.reported.leave_record(strategy.session, checkpoint, path, digest)
            return digest

        return strategy.engine.run(ReplicaCheckpoint(self._parallel.member.fabric, collect, write_and_record)).decode()

    def _file(self, checkpoint: dict[str, Any], path: str, options: Any) -> Any:
        """How a file is written: see `ReplicaCheckpoint`."""
        strategy, model = self._parallel.strategy, self._parallel.member.model

        def write(shards: Sequence[bytes]) -> str:
            states = [codec.decode(shard) for shard in shards]
            checkpoint["state_dict"] = whole_parameters(strategy.module, [state["tensors"] for state in states])
            if "optimizer_states" in checkpoint:
                checkpoint["optimizer_states"] = [whole_optimizer([state["optimizer"] for state in states])]
            return write_checkpoint(strategy.checkpoint_io, checkpoint, path, options)

        return (lambda: model.group.collect(model.state())), write

    def _folder(self, checkpoint: dict[str, Any], path: Path) -> Any:
        """How a folder is written."""
        strategy, group = self._parallel.strategy, self._parallel.member.model.group

        def unfinished() -> FolderStorage:  # no other attempt writes there, not even one of workers that were cut off
            return FolderStorage(path, str(strategy.engine.world.epoch))

        def collect() -> list[bytes]:
            held, storage = self.held(checkpoint), unfinished()
            if group.rank() == 0:
                storage.abandon()
                storage.begin()
            group.sum(torch.zeros(1))  # the folder exists
            return group.collect(folder.write_part(storage, held, group.rank()))

        def write(parts: Sequence[bytes]) -> str:
            return total(folder.finish_folder(unfinished(), parts, self.held(checkpoint)))

        return collect, write

    def held_parts(self) -> Sequence[str]:
        """Return this worker's shard, if it is part of a replica."""
        place = self._parallel.member.fabric.place
        return () if place is None or place.replica is None else (str(self._parallel.shard),)

    def held(self, checkpoint: dict[str, Any]) -> HeldCheckpoint:
        model = self._parallel.member.model
        reshard(model.root)
        optimizer = model.optimizer if "optimizer_states" in checkpoint else None
        return folder.held_part(model.root, optimizer, self._parallel.shard, rest_of(checkpoint))

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
        fitting = self._parallel.strategy.trainer.state.fn == TrainerFn.FITTING
        trained = self._parallel.member.model.fits - self._parallel.strategy.session.left_out
        self.loaded = self.loaded or trained > fitting  # the first fit that is not left out may resume
        if fitting:
            self.check_fit()
        self._parallel.member.fabric.at = int(checkpoint["global_step"])

    def load_optimizers(self, checkpoint: Any, load: Callable[[], None]) -> None:
        """Take this worker's shards of the optimizer's tensors."""
        [state] = checkpoint["optimizer_states"]
        optimizer, part, self._part = self._parallel.member.model.optimizer, self._part, {}
        if optimizer is None:
            return
        if part:
            folder.load_optimizer_part(part, self._parallel.strategy.module, optimizer)
        elif state:
            load_optimizer(optimizer, state, whole=True)


class ReplicaCheckpoint(Indivisible):
    """The operation that writes a checkpoint. Its result is the digest.

    Args:
        fabric: provides this worker's place.
        collect: sends the replica's shards to its first worker, and returns them there.
        write: writes the shards; returns the digest.
    """

    name = "save_checkpoint"

    def __init__(
        self,
        fabric: ReplicaFabric[Any],
        collect: Callable[[], list[bytes]],
        write: Callable[[Sequence[bytes]], str],
    ) -> None:
        self._fabric = fabric
        self._collect = collect
        self._write = write
        self._digest: str | None = None

    def plan(self, reports: ReportSum, rank: int) -> None:
        """Repeat everything unless a present worker has written the file."""
        digests = (report["digest"] for report in reports.members if report is not None)
        self._digest = next((digest for digest in digests if digest is not None), None)

    def attempt(self, engine: Engine) -> bytes:
        place = self._fabric.place
        assert place is not None
        writer = place.layout.replicas[0].members[0]
        engine.fault("collect", engine.step)
        if self._digest is None and place.replica == 0:
            shards = run_released(self._collect)
            if place.rank == writer:
                engine.fault("checkpoint", engine.step)
                self._digest = self._write(shards)
        known = b"" if self._digest is None else self._digest.encode()
        return gather_bytes(engine.communicator, known, engine.tag(self.name))[writer]

    def report(self) -> Report:
        return {"digest": self._digest}
