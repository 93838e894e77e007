"""Checkpoints under the strategy ``unicron``: written once; those of ddp, with other counters, are converted."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.plugins.io.async_plugin import AsyncCheckpointIO
from typing_extensions import override

from unicron_lightning import wire
from unicron_lightning.data.order import StepShape
from unicron_lightning.errors import ConfigError
from unicron_lightning.strategies import join_state
from unicron_lightning.strategies.collecting import CollectingStrategy
from unicron_lightning.strategies.resuming import newest
from unicron_lightning.worker.checkpoint_files import HashingFile, OpenCheckpoint, digest_of, located
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.operations import LeaderAction, unpack_parts

logger = logging.getLogger(__name__)


class CheckpointingStrategy(CollectingStrategy):
    """Save and load Lightning's checkpoints.

    Attributes:
        saved: the last report of each path.
    """

    _divided = False
    """Whether each worker reads a part of a checkpoint; otherwise each reads all of it."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._shape: StepShape | None = None
        self._logged: bytes | None = None
        self._opened: OpenCheckpoint | None = None
        self.saved: dict[str, wire.CheckpointSaved] = {}

    @property
    def engine(self) -> Engine:
        """This worker's engine."""
        raise NotImplementedError

    @override
    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(self._readable(checkpoint_path), *args, **kwargs)
        rounds = 1 if self._shape is None else self._shape.accumulation
        if not {join_state.LOGGED, join_state.WHOLE} & checkpoint.keys():
            count_steps(checkpoint, rounds)
        return checkpoint

    def _readable(self, path: Any) -> Any:
        """Return the path under which a checkpoint is read: one that was checked is held open."""
        return self._opened.path if self._opened is not None and self._opened.name == str(path) else path

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        super().load_model_state_dict(checkpoint, strict)
        self._logged = checkpoint.get(join_state.LOGGED)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint by one worker, and by another if that one dies meanwhile."""
        path, engine = located(filepath), self.engine

        def write() -> bytes:
            return _write(self.checkpoint_io, checkpoint, path, storage_options).encode()

        if self._trainer is not None and "optimizer_states" in checkpoint:
            checkpoint[join_state.LOGGED] = join_state.logged(self._trainer)
        with engine.activity.during("checkpoint"):
            if self._gather.interrupted():
                # Not reported, unless it replaces a checkpoint that was: its digest would be wrong.
                if self.is_global_zero and (digest := write()) and path in self.saved:
                    self._tell_checkpoint(checkpoint, path, digest.decode())
                return
            said = engine.run(LeaderAction("save_checkpoint", write))
        self._tell_checkpoint(checkpoint, path, unpack_parts(said)[0].decode())

    def _tell_checkpoint(self, checkpoint: dict[str, Any], path: str, digest: str) -> None:
        """Report the checkpoint, from which the task resumes if no worker survives."""
        control = self.engine.control
        if control is None or "optimizer_states" not in checkpoint:
            return
        if not digest:
            logger.warning("checkpoint_not_reported path=%s reason=it cannot be read after writing", path)
            return
        step = int(checkpoint["global_step"])
        self.saved[path] = wire.CheckpointSaved(worker=control.worker, path=path, step=step, digest=digest)
        control.send(self.saved[path])  # from all: the first may die now

    def _resume(self, trainer: pl.Trainer, known: Sequence[wire.Checkpoint]) -> dict[str, Any] | None:
        """Resume from the newest of some checkpoints that is as it was written; see `join_state.resume`."""
        with newest(self.engine, known, divided=self._divided) as opened:
            self._opened = opened
            try:
                return join_state.resume(trainer, opened.name)
            finally:
                self._opened = None


def _write(plugin: CheckpointIO, checkpoint: dict[str, Any], path: str, storage_options: Any) -> str:
    """Write a checkpoint; return its digest, or "" if it cannot be read back."""
    while isinstance(plugin, AsyncCheckpointIO) and plugin.checkpoint_io is not None:
        plugin = plugin.checkpoint_io  # a checkpoint is reported once it is complete
    if type(plugin) is TorchCheckpointIO and storage_options is None and "://" not in path:
        return _write_file(checkpoint, Path(path))
    plugin.save_checkpoint(checkpoint, path, storage_options=storage_options)
    try:
        return digest_of(path)
    except OSError:
        return ""


def _write_file(checkpoint: dict[str, Any], path: Path) -> str:
    """Write a file as Lightning does by default, such that it is complete once it is at its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.unfinished")
    try:
        with unfinished.open("wb") as file:
            hashing = HashingFile(file)
            torch.save(checkpoint, cast("IO[bytes]", hashing))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return hashing.digest


def count_steps(checkpoint: dict[str, Any], rounds: int) -> None:
    """Turn a checkpoint's counts of batches per device, as other strategies have them, into counts of steps.

    Args:
        checkpoint: Lightning's.
        rounds: batches per device that make a step (``accumulate_grad_batches``).

    Raises:
        ConfigError: if it was written between two batches of a step.
    """
    progress: Any = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress")
    if progress is None or rounds == 1:
        return
    current, total = progress["current"], progress["total"]
    if current["processed"] % rounds and not progress.get("is_last_batch"):
        raise ConfigError(
            f"the checkpoint was written after batch {current['processed']} of an epoch with accumulate_grad_batches="
            f"{rounds}, in the middle of a step, whose gradients it does not hold: resume from one written after a "
            f"multiple of {rounds} batches"
        )
    epochs = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
    for name, batches in current.items():
        before, rest = divmod(total[name] - batches, max(1, epochs))
        current[name] = -(-batches // rounds)
        total[name] = current[name] + (-(-(total[name] - batches) // rounds) if rest else epochs * -(-before // rounds))
