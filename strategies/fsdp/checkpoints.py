"""Checkpoints of a sharded model: Lightning's single file with whole tensors, which any strategy and any S can load."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from unicron_lightning.fsdp.whole import load_optimizer, load_parameters, whole_optimizer, whole_parameters
from unicron_lightning.strategies.state.checkpointing import SingleFileCheckpoints
from unicron_lightning.worker import codec
from unicron_lightning.worker.operations import Agreement, unpack_parts

if TYPE_CHECKING:
    from unicron_lightning.strategies.fsdp.parallel import FsdpParallel

logger = logging.getLogger(__name__)


class ShardedCheckpoints(SingleFileCheckpoints):
    """Collects the shards of one replica on all workers, of which the first writes the file.

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
        """Complete a checkpoint and write it; repeated by another worker if one dies meanwhile."""
        strategy, member = self._parallel.strategy, self._parallel.member
        if strategy.collectives.interrupted():
            logger.warning("checkpoint_left_out path=%s reason=interrupted, and it needs all workers", path)
            return None

        def shards(_: int) -> bytes:
            place = member.fabric.place
            return member.model.state() if place is not None and place.replica == 0 else b""

        parts = unpack_parts(strategy.engine.run(Agreement("collect_shards", shards)))
        states = sorted((codec.decode(part) for part in parts if part), key=lambda state: int(state["shard"]))
        checkpoint["state_dict"] = whole_parameters(strategy.module, [state["tensors"] for state in states])
        if "optimizer_states" in checkpoint:
            checkpoint["optimizer_states"] = [whole_optimizer([state["optimizer"] for state in states])]
        return super().save(checkpoint, path, options)

    def load_model(self, checkpoint: Any, load: Callable[[], None]) -> None:
        """Take this worker's shards of whole tensors; a joiner's checkpoint has none."""
        if checkpoint["state_dict"]:
            load_parameters(self._parallel.strategy.module, checkpoint["state_dict"])
            self._parallel.member.fabric.at = int(checkpoint["global_step"])

    def load_optimizers(self, checkpoint: Any, load: Callable[[], None]) -> None:
        """Take this worker's shards of the optimizer's tensors."""
        [state] = checkpoint["optimizer_states"]
        if state:
            load_optimizer(self._parallel.member.model.optimizer, state)
