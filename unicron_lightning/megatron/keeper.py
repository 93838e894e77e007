"""One worker's shard of the distributed optimizer (ZeRO-1) through epochs: its copies on peers, and its restoration.

A step is committed only after every worker has done its update and has the copies (`Mirror.protect`). At any
moment the last committed version is therefore complete in host memory, own and mirrored, and no result of the next one
has been published. After a failure at any moment, the members of the new epoch return to, or stay at, the newest
version that one of them has committed; gradients of completed calls are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state

from unicron_lightning.errors import ConfigError
from unicron_lightning.megatron.gradients import MainGradients
from unicron_lightning.megatron.sharded import ShardedOptimizer
from unicron_lightning.replica.channels import Channels
from unicron_lightning.replica.fabric import run_released, start_anew
from unicron_lightning.replica.mirror import (
    ROWS,
    Holding,
    Mirror,
    Piece,
    Redundancy,
    Stored,
    assemble,
    cut,
    missing,
    transfers,
)
from unicron_lightning.worker.communication.communicator import gather_rows
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.state_parts import Place


class ShardKeeper:
    """A worker's optimizer shard, its copies, and those that it keeps for others.

    Args:
        optimizer: the shard, in the layout in which it was built.
        gradients: of the same buffers.
        redundancy: number of copies.

    Attributes:
        founded: set by the strategy once all workers have the task's initial state.
        saved: steps in the newest checkpoint, set by the strategy after writing one; None without a checkpoint.
    """

    def __init__(self, optimizer: ShardedOptimizer, gradients: MainGradients, redundancy: Redundancy) -> None:
        self._optimizer = optimizer
        self._gradients = gradients
        self._redundancy = redundancy
        self._mirror = Mirror(optimizer, redundancy)
        self.founded = False
        self.saved: int | None = None

    def found(self, engine: Engine, channels: Channels) -> None:
        """Distribute the shards over the present replicas at the task's start. A collective of this shard's workers."""
        assert channels.exchange is not None
        self._mirror.place = _place(engine)
        self._mirror.forget(-1)
        try:
            self._optimizer.lay_out(self._optimizer.groups)
        finally:
            self._gradients.rebind()
        self._mirror.join(channels.exchange)

    def keep(self, version: int) -> None:
        """Return when the present shard is safe. A collective of this shard's workers.

        Raises:
            CommunicatorAborted: one of them failed.
        """
        if self._redundancy.copies:
            self._mirror.protect(version)
        else:
            self._mirror.hold(version)

    def copies(self, version: int) -> dict[int, Stored]:
        """Return this rank's copies of a version, of its own shard first, by the data-parallel rank of the owner."""
        return self._mirror.copies(version)

    @property
    def replicas(self) -> int:
        """Ranks over which the state is spread."""
        return self._mirror.ranks

    def replace(self, version: int) -> None:
        """`keep` a state from a checkpoint, which may have the number of a kept version."""
        self._mirror.forget(version - 1)
        self.keep(version)
        self.saved = version

    def present(self) -> Stored:
        """Return a copy of this worker's shard as it is now, also after the end of the run."""
        pieces = self._optimizer.pieces
        data = torch.empty(ROWS, sum(map(len, pieces)))
        self._optimizer.read(data)
        return Stored(holding=Holding(version=0, pieces=pieces), data=data, layout=0)

    def plain_state(self) -> dict[str, Any]:
        """Return this worker's shard as plain data: its pieces, values as of `ShardedOptimizer.read`, and steps."""
        own = self.present()
        pieces = [[each.parameter, each.start, each.stop] for each in own.holding.pieces]
        return {"pieces": pieces, "data": own.data, "steps": self._optimizer.steps}

    def load_plain(self, states: Sequence[Mapping[str, Any]], version: int) -> None:
        """Load the parts of all workers that have had this shard, however many there are now. A collective of those.

        Raises:
            CommunicatorAborted: one of them failed.
        """
        own = self._optimizer.pieces
        stored = [
            Stored(
                holding=Holding(version=version, pieces=tuple(Piece(*each) for each in state["pieces"])),
                data=state["data"],
                layout=0,
            )
            for state in states
        ]
        found = transfers(version, [(each.holding,) for each in stored], [own])
        values = [cut(stored[each.source], each.piece).reshape(-1) for each in found]
        data = assemble(own, [each.piece for each in found], torch.cat(values or [torch.empty(0)]))
        self._optimizer.write(data, float(states[0]["steps"]))
        run_released(self._optimizer.gather_parameters)
        self._mirror.forget(version - 1)
        self.keep(version)

    def complete(self, states: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the parts of some workers are the whole shard."""
        held = [(Holding(version=0, pieces=tuple(Piece(*each) for each in state["pieces"])),) for state in states]
        return not missing(0, held, self._optimizer.whole)

    def enter(self, engine: Engine, channels: Channels | None, version: int) -> None:
        """Set state, parameters and layout for an epoch's replicas. All members of the epoch call this.

        Args:
            engine: has the epoch's communicator.
            channels: None for a spare.
            version: highest number of optimizer steps that any member has committed.

        Raises:
            CommunicatorAborted: a member failed.
        """
        mirror = self._mirror
        mirror.place = _place(engine)
        mirror.pause()
        mirror.forget(version)  # an uncommitted attempt, which will be repeated
        lacks = False
        if channels is not None:
            assert channels.exchange is not None
            self._gradients.recover()
            lacks = version not in mirror.survey(channels.exchange)
        lacking, founded = gather_rows(engine.communicator, [float(lacks), float(self.founded)]).sum(0).tolist()
        if lacking:
            if founded:
                start_anew(self._loss(version, mirror.lost() if lacks else ""))
            return  # the initial state is created again
        if channels is None:
            return
        try:
            run_released(lambda: mirror.restore(version))
        finally:
            self._gradients.rebind()
        self.keep(version)

    def close(self) -> None:
        """Drop all copies."""
        self._mirror.close()

    def _loss(self, version: int, found: str) -> str:
        """Description of the loss for a log line."""
        place = parallel_state.get_data_parallel_rank() if parallel_state.is_initialized() else None
        why = found or "reported by workers of another shard of the model"
        back = (
            f"the task continues from the checkpoint of step {self.saved}; steps lost: {version - self.saved}"
            if self.saved is not None
            else f"no checkpoint was written in this run; steps lost: up to {version}"
        )
        return (
            f"the optimizer's shards of step {version} are incomplete, as a worker has died together with "
            f"all holders of its copy (copies={self._redundancy.copies}): {why} (data-parallel rank {place}); {back}"
        )


def _place(engine: Engine) -> Place:
    """Return this worker's rack and node."""
    world = engine.world
    return world.places[world.rank] if world.nodes else ("", "")


def check_redundancy(redundancy: Redundancy | None, *, distributed: bool) -> Redundancy | None:
    """The user's or the default redundancy; None without optimizer shards.

    Raises:
        ConfigError: the strategy does not support it.
    """
    if not distributed:
        if redundancy is not None:
            raise ConfigError(
                f"redundancy={redundancy!r} is for optimizer shards: expected "
                "ddp=DistributedDataParallelConfig(use_distributed_optimizer=True) with it"
            )
        return None
    return Redundancy() if redundancy is None else redundancy
