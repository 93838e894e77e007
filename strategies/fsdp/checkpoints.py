"""Checkpoints of a sharded model: Lightning's single file with whole tensors, which any strategy and any S can load."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from unicron_lightning.fsdp.whole import load_optimizer, load_parameters, whole_optimizer, whole_parameters
from unicron_lightning.replica.fabric import ReplicaFabric, run_released
from unicron_lightning.strategies.state.checkpointing import SingleFileCheckpoints, write_checkpoint
from unicron_lightning.worker import codec
from unicron_lightning.worker.communication.communicator import gather_bytes
from unicron_lightning.worker.engine import Engine, Report
from unicron_lightning.worker.operations import Indivisible

if TYPE_CHECKING:
    from unicron_lightning.strategies.fsdp.parallel import FsdpParallel

logger = logging.getLogger(__name__)


class ShardedCheckpoints(SingleFileCheckpoints):
    """Collects the shards of one replica on its first worker, which writes the file.

    Args:
        parallel: the parallelism that they belong to.
    """

    restores_late = True

    def __init__(self, parallel: FsdpParallel) -> None:
        super().__init__(parallel.strategy)
        self._parallel = parallel

    def module_state(self, state: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return an empty state: see `save`; joiners get their shards from another replica."""
        return {}

    def optimizer_state(self, optimizer: Optimizer, state: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return an empty state, as `module_state`."""
        return {}

    def save(self, checkpoint: dict[str, Any], path: str, options: Any) -> str | None:
        """Complete a checkpoint and write it; repeated by another replica if a worker dies meanwhile."""
        strategy, member = self._parallel.strategy, self._parallel.member
        if strategy.collectives.interrupted():
            logger.warning("checkpoint_left_out path=%s reason=interrupted, and it needs all workers", path)
            return None

        def write(shards: Sequence[bytes]) -> str:
            states = [codec.decode(shard) for shard in shards]
            checkpoint["state_dict"] = whole_parameters(strategy.module, [state["tensors"] for state in states])
            if "optimizer_states" in checkpoint:
                checkpoint["optimizer_states"] = [whole_optimizer([state["optimizer"] for state in states])]
            return write_checkpoint(strategy.checkpoint_io, checkpoint, path, options)

        def collect() -> list[bytes]:
            return member.model.group.collect(member.model.state())

        return strategy.engine.run(ReplicaCheckpoint(member.fabric, collect, write)).decode()

    def load_model(self, checkpoint: Any, load: Callable[[], None]) -> None:
        """Take this worker's shards of whole tensors; a joiner's checkpoint has none."""
        if checkpoint["state_dict"]:
            load_parameters(self._parallel.strategy.module, checkpoint["state_dict"])
            self._parallel.member.fabric.at = int(checkpoint["global_step"])

    def load_optimizers(self, checkpoint: Any, load: Callable[[], None]) -> None:
        """Take this worker's shards of the optimizer's tensors."""
        [state] = checkpoint["optimizer_states"]
        optimizer = self._parallel.member.model.optimizer
        if state and optimizer is not None:
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

    def plan(self, reports: Sequence[Report | None], rank: int) -> None:
        """Repeat everything unless a present worker has written the file."""
        digests = (report["digest"] for report in reports if report is not None)
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
