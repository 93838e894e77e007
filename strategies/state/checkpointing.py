"""Checkpoints: reported once written, checked before a task resumes from them. Those of ddp are converted."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, cast

import lightning.pytorch as pl
import msgspec
import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.plugins.io.async_plugin import AsyncCheckpointIO

from unicron_lightning import wire
from unicron_lightning.checkpoints.files import (
    MODEL,
    OPTIMIZER,
    HashingFile,
    OpenCheckpoint,
    by_name,
    digest_of,
    is_folder,
    leave_record,
    located,
    size_of,
    total,
)
from unicron_lightning.checkpoints.pieces import HeldCheckpoint
from unicron_lightning.checkpoints.saving import SaveFolder, WriteFile
from unicron_lightning.data.order import StepShape
from unicron_lightning.errors import ConfigError
from unicron_lightning.strategies.parallelism import CheckpointStore
from unicron_lightning.strategies.session import FitPassed, Session
from unicron_lightning.strategies.state import join_state
from unicron_lightning.worker.codec import unpack_parts
from unicron_lightning.worker.control.thread import Control
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.operations import Agreement

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
        names = {id(each): name for name, each in self._strategy.module.named_parameters()}
        optimizers = checkpoint.get("optimizer_states", [])
        for number, (own, optimizer) in enumerate(zip(optimizers, self._strategy.optimizers, strict=False)):
            groups = [
                [names.get(id(each), f"{at}.{place}") for place, each in enumerate(group["params"])]
                for at, group in enumerate(optimizer.param_groups)
            ]
            state[f"{OPTIMIZER}{number}"] = by_name(own, groups)
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


class CheckpointsChanged(ConfigError):
    """No known checkpoint of the task is as it was written; the message names the newest and both digests."""


class _Seen(msgspec.Struct):
    """A rank's view of a checkpoint."""

    digests: dict[str, str] = {}
    error: str = ""


class ReportedCheckpoints:
    """Checkpoints that the coordinator knows, from which the task resumes if no worker survives.

    Attributes:
        saved: the last report of each path.
        fit: number of the script's present ``fit``.
    """

    def __init__(self) -> None:
        self.fit = 1
        self.saved: dict[str, wire.CheckpointSaved] = {}
        self._opened: OpenCheckpoint | None = None

    def report(self, engine: Engine, checkpoint: dict[str, Any], path: str, digest: str) -> None:
        """Report a checkpoint that was written."""
        control = engine.control
        if control is None or "optimizer_states" not in checkpoint:
            return
        if not digest:
            logger.warning("checkpoint_not_reported path=%s reason=it cannot be read after writing", path)
            return
        self.written(control, path, int(checkpoint["global_step"]), digest)

    def leave_record(self, session: Session, checkpoint: dict[str, Any], path: str, digest: str) -> None:
        """Leave the record of a checkpoint that this worker has written, as all may die before it is reported."""
        if session.record and digest and "optimizer_states" in checkpoint:
            leave_record(Path(session.record), path, int(checkpoint["global_step"]), digest, self.fit)

    def written(self, control: Control | None, path: str, step: int, digest: str) -> None:
        """Report a complete checkpoint; for all workers, as the first may die now."""
        if control is not None:
            self.saved[path] = wire.CheckpointSaved(
                worker=control.worker, path=path, step=step, digest=digest, bytes=size_of(path), fit=self.fit
            )
            control.send(self.saved[path])

    def readable(self, path: Any) -> Any:
        """Return the path under which a checkpoint is read: one that was checked is held open."""
        return self._opened.path if self._opened is not None and self._opened.name == str(path) else path

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
            if not checkpoint.life:  # found by its record
                self.written(engine.control, checkpoint.path, checkpoint.step, checkpoint.digest)
            if engine.control is not None and engine.world.rank == 0:
                engine.control.event("state_restored", tier="disk", step=checkpoint.step, path=opened.name)
            return state


@contextmanager
def newest(
    engine: Engine, known: Sequence[wire.Checkpoint], *, divided: bool
) -> Iterator[tuple[OpenCheckpoint, wire.Checkpoint]]:
    """Hold the first of some checkpoints open that all ranks find as it was written, and yield it with what is known.

    For all ranks together.

    Args:
        engine: has state.
        known: checkpoints of the task, newest first.
        divided: whether each rank reads its part of the files, and so a part of a folder; otherwise each reads all.

    Raises:
        CheckpointsChanged: there is none.
    """
    refused: list[str] = []
    for number, checkpoint in enumerate(known):
        opened, found = _look(engine, checkpoint, number, divided=divided)
        try:
            if found == checkpoint.digest and opened is not None:
                yield opened, checkpoint
                return
        finally:
            if opened is not None:
                opened.close()
        refused.append(f"{checkpoint.path} has {found}, expected {checkpoint.digest}")
        _report(engine, checkpoint, found)
    more = f" (and {len(refused) - 1} older: see checkpoint_rejected)" if refused[1:] else ""
    raise CheckpointsChanged(
        f"no checkpoint of the task is as it was written (SHA-256): {refused[0]}{more}. Restore one, or start a new "
        "task with ckpt_path"
    )


def _look(
    engine: Engine, checkpoint: wire.Checkpoint, number: int, *, divided: bool
) -> tuple[OpenCheckpoint | None, str]:
    """Open a checkpoint; return it with the digest on which all ranks agree, or an explanation."""
    opened, seen = None, _Seen()
    try:
        opened = OpenCheckpoint(checkpoint.path)
    except OSError as error:
        seen.error = str(error)

    def look(rank: int) -> bytes:
        part = (rank, engine.world.size) if divided else (0, 1)
        try:
            seen.digests = {} if opened is None else opened.digests(*part)
        except OSError as error:
            seen.error = str(error)
        return msgspec.json.encode(seen)

    said = engine.run(Agreement(f"checkpoint {number}", look))
    return opened, _agreed([msgspec.json.decode(part, type=_Seen) for part in unpack_parts(said)], divided=divided)


def _agreed(views: Sequence[_Seen], *, divided: bool) -> str:
    """Return the digest that all ranks have found, or an explanation."""
    if errors := [f"rank {rank}: {view.error}" for rank, view in enumerate(views) if view.error]:
        return errors[0]
    if divided:
        return total({name: digest for view in views for name, digest in view.digests.items()})
    found = sorted({total(view.digests) for view in views})
    return found[0] if len(found) == 1 else f"{' and '.join(found)} on different ranks"


def _report(engine: Engine, checkpoint: wire.Checkpoint, found: str) -> None:
    fields = {"path": checkpoint.path, "step": checkpoint.step, "expected": checkpoint.digest, "found": found}
    logger.error("checkpoint_rejected path=%(path)s step=%(step)d expected=%(expected)s found=%(found)s", fields)
    if engine.control is not None and engine.world.rank == 0:
        engine.control.event("checkpoint_rejected", **fields)


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
        return _write_file(checkpoint, Path(path))
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
