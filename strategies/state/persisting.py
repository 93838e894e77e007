"""Checkpoints that are written while training continues, by processes of their own, from copies in shared memory.

All members call `Persisting.save` at the same place. They agree on the members that write the version, copy their parts
and return. A version is complete when its folder is at its path; each worker then reports it. A failure is a warning
and an event, and leaves the version before it in place.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import lightning.pytorch as pl
import msgspec

from unicron_lightning.checkpoints.client import IN_FLIGHT, SharedBuffer, WriterProcess
from unicron_lightning.checkpoints.division import shard_writers
from unicron_lightning.checkpoints.messages import WriteVersion
from unicron_lightning.checkpoints.staging import stage
from unicron_lightning.errors import ConfigError
from unicron_lightning.worker.checkpoint_files import located
from unicron_lightning.worker.operations import Agreement, unpack_parts
from unicron_lightning.worker.state_parts import Place, holders

if TYPE_CHECKING:
    from unicron_lightning.strategies.fault_tolerant import FaultTolerantStrategy

logger = logging.getLogger(__name__)

WRITE_SECONDS: Final = 600.0
"""Time limit of a version; a save waits as long if two versions before it are not finished."""
_BROKEN_OFF_SECONDS: Final = 20.0
"""Seconds for which a run that an exception has ended waits for its checkpoints."""


@dataclass
class _Saved:
    """A version, from its staging on."""

    path: str
    step: int
    reports: bool
    state: str = "pending"
    then: list[Callable[[], None]] = field(default_factory=list)


class Persisting:
    """This worker's part in writing checkpoints.

    Args:
        strategy: provides engine, state and reports.
    """

    def __init__(self, strategy: FaultTolerantStrategy) -> None:
        self._strategy = strategy
        self._writer: WriterProcess | None = None
        self._partners = 0
        self._lock = threading.Lock()
        self._saved: list[_Saved] = []
        self._number = 0

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a trainer writes nothing yet."""
        return {"_strategy": self._strategy}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(vars(Persisting(state["_strategy"])))

    def use(self, partners: int) -> None:
        """Start this worker's writer.

        Args:
            partners: workers that also hold each part, and write it if its first writer is lost.

        Raises:
            ConfigError: the strategy's checkpoints have another format.
        """
        if not self._strategy.parallelism.checkpoints.writes_beside:
            raise ConfigError(
                'UnicronCheckpoint needs Trainer(strategy="unicron") or "unicron_fsdp", found strategy='
                f"{self._strategy.strategy_name!r}; use ModelCheckpoint there"
            )
        self._partners = max(partners, self._partners)
        if self._writer is None:
            self._writer = WriterProcess(self._members)

    def save(self, trainer: pl.Trainer, path: Any, *, weights_only: bool) -> None:
        """Stage a checkpoint and have it written; for all members together."""
        strategy, engine, writer = self._strategy, self._strategy.engine, self._writer
        assert writer is not None, "use() first"
        with engine.activity.during("checkpoint"):
            workers, held, rank, name = self._agree()
            checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only)
            strategy.complete(checkpoint)
            saved = _Saved(located(path), int(checkpoint["global_step"]), "optimizer_states" in checkpoint)
            self._number += 1
            order = WriteVersion(
                number=self._number, name=name, path=saved.path, rank=rank, holders=held, seconds=WRITE_SECONDS
            )
            buffers: list[SharedBuffer] = []
            try:
                if not writer.wait(IN_FLIGHT - 1, WRITE_SECONDS, saved.path):
                    raise OSError("versions before it are not finished")
                order, buffers = stage(writer.buffer, order, strategy.parallelism.checkpoints.held(checkpoint))
            except (OSError, MemoryError, ValueError, RuntimeError) as error:
                order, buffers = msgspec.structs.replace(order, error=str(error)[:500] or repr(error)), []
            with self._lock:
                self._saved.append(saved)
            writer.write(order, workers, buffers, lambda digest, error: self._outcome(saved, digest, error))

    def pending(self, path: Any) -> bool:
        """Whether a version is being written to this path."""
        with self._lock:
            return any(each.path == located(path) and each.state == "pending" for each in self._saved)

    def after(self, action: Callable[[], None]) -> None:
        """Act once the newest version is complete and those before it are finished; not if the newest one fails."""
        with self._lock:
            if self._saved:
                self._saved[-1].then.append(action)
                return
        action()

    def finish(self, seconds: float) -> None:
        """Wait for the versions, at most so long."""
        if self._writer is not None and not self._writer.wait(0, seconds):
            logger.warning("checkpoints_not_finished seconds=%g", seconds)

    def close(self, *, whole: bool) -> None:
        """End a run: wait for the versions, if no exception has ended it, and end the writer."""
        if self._writer is not None:
            self._writer.close(WRITE_SECONDS if whole else _BROKEN_OFF_SECONDS)
            self._writer = None
        self._saved.clear()

    # ---- parts of a save

    def _agree(self) -> tuple[list[str], list[list[int]], int, str]:
        """Agree on the writers of a version.

        A failure may be known to some members only. The result of an operation is the same on all.

        Returns:
            Workers by rank, the ranks that hold each part, this worker's rank, and the version's name.
        """
        engine = self._strategy.engine
        own = "" if engine.control is None else engine.control.worker

        def about(rank: int) -> bytes:
            place = engine.world.places[rank] if engine.world.nodes else ("", "")
            return msgspec.json.encode([own, place, self._strategy.parallelism.checkpoints.held_shard()])

        result = engine.run(Agreement("checkpoint_writers", about))
        members = [msgspec.json.decode(part, type=tuple[str, Place, int | None]) for part in unpack_parts(result)]
        workers = [worker for worker, _, _ in members]
        name = f"{engine.position}-{hashlib.sha256(result).hexdigest()[:12]}"
        shards = [shard for _, _, shard in members]
        if any(shard is not None for shard in shards):
            return workers, shard_writers(shards), workers.index(own), name
        places = [place for _, place, _ in members]
        held = [holders(places, part, self._partners) for part in range(len(places))]
        return workers, held, workers.index(own), name

    # ---- called by the writer's thread

    def _members(self) -> Collection[str] | None:
        control = self._strategy.engine.control
        latest = None if control is None else control.latest
        return None if latest is None else {member.worker for member in latest.members}

    def _outcome(self, saved: _Saved, digest: str, error: str) -> None:
        strategy, control = self._strategy, self._strategy.engine.control
        if digest and saved.reports:
            strategy.reported.written(control, saved.path, saved.step, digest)
        elif error:
            logger.warning("checkpoint_failed path=%s step=%d error=%s", saved.path, saved.step, error)
            if control is not None and strategy.engine.world.rank == 0:
                control.event("checkpoint_failed", path=saved.path, step=saved.step, error=error[:500])
        with self._lock:
            saved.state = "complete" if digest else "failed"
            finished = []
            while self._saved and self._saved[0].state != "pending":
                finished.append(self._saved.pop(0))
        for action in (action for each in finished if each.state == "complete" for action in each.then):
            try:
                action()
            except OSError as problem:  # e.g. of the removal of the checkpoint before
                logger.warning("checkpoint_left path=%s error=%s", saved.path, problem)
