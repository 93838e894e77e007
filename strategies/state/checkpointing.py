"""Lightning's checkpoints: written, also while training continues, and read by a run that resumes. Those of ddp are
converted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import lightning.pytorch as pl
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.plugins.io.async_plugin import AsyncCheckpointIO
from torch import Tensor
from typing_extensions import override

from unicron_lightning import wire
from unicron_lightning.checkpoints.beside import CheckpointsBeside, TakenCheckpoint, memory_of
from unicron_lightning.checkpoints.files import (
    MODEL,
    OPTIMIZER,
    by_name,
    digest_of,
    is_folder,
    located,
)
from unicron_lightning.checkpoints.pieces import HeldCheckpoint
from unicron_lightning.checkpoints.reported import ReportedCheckpoints, newest, write_file
from unicron_lightning.checkpoints.saving import SaveFolder, WriteFile
from unicron_lightning.data.order import StepShape
from unicron_lightning.errors import ConfigError
from unicron_lightning.strategies.parallelism import CheckpointStore
from unicron_lightning.strategies.state import join_state
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.model_state import group_names
from unicron_lightning.worker.session import FitPassed

if TYPE_CHECKING:
    from unicron_lightning.strategies.fault_tolerant import FaultTolerantStrategy


logger = logging.getLogger(__name__)

_LIGHTNINGS: Final = TorchCheckpointIO.save_checkpoint
_ASYNCHRONOUS: Final = AsyncCheckpointIO.save_checkpoint


class SingleFileCheckpoints(CheckpointStore):
    """Lightning's own checkpoints.

    Args:
        strategy: provides engine and Lightning's writer.
    """

    def __init__(self, strategy: FaultTolerantStrategy) -> None:
        self._strategy = strategy

    def save(self, checkpoint: dict[str, Any], filepath: Any, options: Any) -> str | None:
        """Write a checkpoint by one worker, and by another if that one dies meanwhile."""
        strategy, path = self._strategy, located(filepath)

        def write(_: Sequence[bytes] = ()) -> str:
            digest = write_checkpoint(strategy.checkpoint_io, checkpoint, filepath, options)
            strategy.reported.leave_record(strategy.session, checkpoint, path, digest)
            return digest

        if strategy.collectives.interrupted():
            # Not reported, unless it replaces a checkpoint that was: its digest would be wrong.
            digest = write() if strategy.is_global_zero else ""
            return digest if digest and path in strategy.reported.saved else None
        return strategy.engine.run(WriteFile(write)).decode()

    def load(self, path: Any, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the checkpoint, a file or a folder; one of another strategy counts steps from now on."""
        if not is_folder(path):
            return self.converted(read())
        from unicron_lightning.checkpoints.index import read_checkpoint  # takes half a second to import

        return self.converted(read_checkpoint(path))

    def held(self, checkpoint: dict[str, Any]) -> HeldCheckpoint:
        state: dict[str, Any] = {MODEL: checkpoint["state_dict"]}
        optimizers = checkpoint.get("optimizer_states", [])
        for number, (own, optimizer) in enumerate(zip(optimizers, self._strategy.optimizers, strict=False)):
            state[f"{OPTIMIZER}{number}"] = by_name(own, group_names(optimizer, self._strategy.module))
        return HeldCheckpoint.whole(state, rest_of(checkpoint))

    def converted(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return a checkpoint with counts of steps."""
        if not {join_state.BESIDE, join_state.WHOLE} & checkpoint.keys():
            count_steps(checkpoint, self._strategy.shape)
        return checkpoint


def save_folder(
    strategy: FaultTolerantStrategy,
    checkpoint: dict[str, Any],
    path: str,
    names: Callable[[], Sequence[str]],
    held: Callable[[], HeldCheckpoint],
) -> str:
    """Write a checkpoint as a folder, by all workers that hold parts of it; return its digest.

    Args:
        strategy: provides engine and reports.
        checkpoint: Lightning's.
        path: of the folder.
        names: see `SaveFolder`.
        held: see `SaveFolder`.
    """

    def done(digest: str) -> None:
        strategy.reported.leave_record(strategy.session, checkpoint, path, digest)

    return strategy.engine.run(SaveFolder(path, names, held, done)).decode()


def left_out(strategy: FaultTolerantStrategy, path: str) -> bool:
    """Whether a checkpoint that all workers write together is left out, as an exception has interrupted the run."""
    interrupted = strategy.collectives.interrupted()
    if interrupted:
        logger.warning("checkpoint_left_out path=%s reason=interrupted, and it needs all workers", path)
    return interrupted


class ResumedCheckpoints(ReportedCheckpoints):
    """Reported checkpoints, and the resumption of a trainer from them."""

    def resume(
        self,
        trainer: pl.Trainer,
        engine: Engine,
        known: Sequence[wire.Checkpoint],
        take_beside: Callable[[], bytes | None],
        *,
        divided: bool,
    ) -> dict[str, Any]:
        """Resume from the newest of some checkpoints that is as it was written; see `join_state.resume`.

        Raises:
            FitPassed: it is of a later ``fit`` of the script.
        """
        with newest(engine, known, divided=divided) as (opened, checkpoint):
            if checkpoint.fit != self.fit:
                raise FitPassed(f"{checkpoint.path} is of fit number {checkpoint.fit}")
            self._opened = opened
            try:
                state = join_state.resume(trainer, opened.name, take_beside)
            finally:
                self._opened = None
            self.resumed(engine, checkpoint, opened.name)
            return state


def rest_of(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a checkpoint that is not model or optimizer."""
    return {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}


def write_checkpoint(plugin: CheckpointIO, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> str:
    """Write a checkpoint; return its digest, or "" if it cannot be read back."""
    while (inner := _inner(plugin)) is not None:
        plugin = inner
    path = located(filepath)
    own = getattr(plugin.save_checkpoint, "__func__", None) is not _LIGHTNINGS  # of a script, or in place of it
    if not own and storage_options is None and "://" not in path:
        return write_file(checkpoint, Path(path))
    plugin.save_checkpoint(checkpoint, filepath, storage_options=storage_options)
    if isinstance(plugin, AsyncCheckpointIO):
        return ""  # it may still be written
    try:
        return digest_of(path)
    except OSError:
        return ""


def _inner(plugin: CheckpointIO) -> CheckpointIO | None:
    """Return the plugin that Lightning's asynchronous one calls: a checkpoint is reported once it is complete."""
    if not isinstance(plugin, AsyncCheckpointIO):
        return None
    return plugin.checkpoint_io if getattr(plugin.save_checkpoint, "__func__", None) is _ASYNCHRONOUS else None


def count_steps(checkpoint: dict[str, Any], shape: StepShape) -> None:
    """Turn a checkpoint's counts of batches per device, as other strategies have them, into counts of steps.

    Args:
        checkpoint: Lightning's.
        shape: of the steps.

    Raises:
        ConfigError: if it was written between two batches of a step.
    """
    progress: Any = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress")
    if progress is None or shape.accumulation == 1:
        return
    current, total = progress["current"], progress["total"]
    epoch = max(0, checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["ready"] - 1)
    rounds = shape.of(epoch).accumulation
    if current["processed"] % rounds and not progress.get("is_last_batch"):
        raise ConfigError(
            f"the checkpoint was written after batch {current['processed']} of an epoch with accumulate_grad_batches="
            f"{rounds}, in the middle of a step, whose gradients it does not hold: resume from one written after a "
            f"multiple of {rounds} batches"
        )
    for name, batches in current.items():
        each, rest = divmod(total[name] - batches, max(1, epoch))
        before = [each + rest, *[each] * (epoch - 1)][:epoch]
        current[name] = -(-batches // rounds)
        total[name] = current[name] + sum(shape.of(number).steps(size) for number, size in enumerate(before))


class Persisting(CheckpointsBeside):
    """This worker's part in writing checkpoints of a trainer.

    Args:
        strategy: provides session, state and reports.
    """

    def __init__(self, strategy: FaultTolerantStrategy) -> None:
        super().__init__(strategy)
        self._strategy = strategy

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a trainer writes nothing yet."""
        return {"_strategy": self._strategy}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(vars(Persisting(state["_strategy"])))

    @override
    def use(self, folder: str, partners: int, *, overlap: bool) -> None:
        """Start this worker's writer.

        Raises:
            ConfigError: the strategy's checkpoints cannot be there.
        """
        if "://" in folder and not self._strategy.parallelism.checkpoints.at_urls:
            raise ConfigError(
                f"UnicronCheckpoint({folder!r}): checkpoints of the strategy {self._strategy.strategy_name} are "
                "folders of a file system that all workers see; expected a local path"
            )
        super().use(folder, partners, overlap=overlap)

    def save(self, trainer: pl.Trainer, path: Any, *, weights_only: bool) -> None:
        """Stage a checkpoint and have it written; for all members together."""
        strategy = self._strategy

        def take() -> TakenCheckpoint:
            checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only)
            strategy.complete(checkpoint)
            late = strategy.module.automatic_optimization and _continues(trainer)
            return TakenCheckpoint(
                step=int(checkpoint["global_step"]),
                resumable="optimizer_states" in checkpoint,
                held=partial(strategy.parallelism.checkpoints.held, checkpoint),
                steady=_steady(strategy) if late else (),
            )

        self.write(path, take)

    @override
    def held_parts(self) -> Sequence[str]:
        return self._strategy.parallelism.checkpoints.held_parts()

    @override
    def written(self, step: int) -> None:
        self._strategy.parallelism.checkpoints.written(step)

    @override
    def remove_now(self, path: str) -> None:
        self._strategy.checkpoint_io.remove_checkpoint(path)


def _steady(strategy: FaultTolerantStrategy) -> set[int]:
    """Return the addresses of the memory that changes in the optimizer's step only."""
    states = (state for each in strategy.optimizers for state in each.state.values() if isinstance(state, dict))
    kept = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    kept += strategy.parallelism.checkpoints.steady()
    return memory_of([*strategy.module.parameters(), *kept]) - memory_of(strategy.parallelism.unsteady())


def _continues(trainer: pl.Trainer) -> bool:
    """Whether the next gradients follow, without a validation or an end, in whose hooks parameters may change."""
    loop, every = trainer.fit_loop.epoch_loop, trainer.val_check_batch
    if loop.batch_progress.is_last_batch or trainer.should_stop or trainer.global_step == trainer.max_steps:
        return False
    if not trainer.enable_validation:
        return True
    done = loop.batch_idx + 1, loop.total_batch_idx + 1
    return isinstance(every, int | float) and not any(each % every == 0 for each in done)
