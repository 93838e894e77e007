"""One worker's shard of the distributed optimizer (ZeRO-1) through epochs: what peers keep of it, and the way back.

A step is committed when everyone has done its update and has the copies of it (`Mirror` without overlap), not before:
so at any moment the last committed version is whole in host memory, own and mirrored, and of the next one nobody has
told anybody anything. Whatever moment a failure comes at, the members of the new epoch go back to, or stay at, the
newest version that one of them has committed; gradients of completed calls are kept.
"""

from __future__ import annotations

from megatron.core import parallel_state

from unicron_lightning.errors import ConfigError
from unicron_lightning.megatron.channels import Channels
from unicron_lightning.megatron.fabric import run_released, start_anew
from unicron_lightning.megatron.gradients import MainGradients
from unicron_lightning.megatron.mirror import Mirror, Redundancy
from unicron_lightning.megatron.sharded import ShardedOptimizer
from unicron_lightning.worker.communicator import gather_rows
from unicron_lightning.worker.engine import Engine


class ShardKeeper:
    """A worker's optimizer shard, its copies, and those that it keeps for others.

    Args:
        optimizer: the shard, in whatever layout it was built.
        gradients: of the same buffers.
        redundancy: how many copies.

    Attributes:
        founded: told by the strategy: the task's initial state is everywhere.
        saved: steps done in the newest checkpoint, told by the strategy when it writes one; None if there is none.
    """

    def __init__(self, optimizer: ShardedOptimizer, gradients: MainGradients, redundancy: Redundancy) -> None:
        self._optimizer = optimizer
        self._gradients = gradients
        self._redundancy = redundancy
        self._mirror = Mirror(optimizer, redundancy)
        self.founded = False
        self.saved: int | None = None

    def found(self, engine: Engine, channels: Channels) -> None:
        """At the task's start: lays shards out for the replicas there are. A collective of this shard's workers."""
        assert channels.exchange is not None
        self._mirror.node = _node(engine)
        self._mirror.forget(-1)
        try:
            self._optimizer.lay_out(self._optimizer.groups)
        finally:
            self._gradients.rebind()
        self._mirror.join(channels.exchange)

    def keep(self, version: int) -> None:
        """Returns when the shard as it now is, is safe. A collective of this shard's workers.

        Raises:
            CommunicatorAborted: one of them failed.
        """
        if self._redundancy.copies:
            self._mirror.protect(version)
        else:
            self._mirror.hold(version)

    def replace(self, version: int) -> None:
        """As `keep`, of a state that comes from a checkpoint and may have the number of one that is kept."""
        self._mirror.forget(version - 1)
        self.keep(version)
        self.saved = version

    def enter(self, engine: Engine, channels: Channels | None, version: int) -> None:
        """State, parameters and layout of an epoch's replicas; all members of the epoch come here.

        Args:
            engine: has the epoch's communicator.
            channels: None for a spare.
            version: optimizer steps that some member has committed, and none more.

        Raises:
            CommunicatorAborted: a member failed.
        """
        mirror = self._mirror
        mirror.node = _node(engine)
        mirror.pause()
        mirror.forget(version)  # an attempt that was not committed, and will be made again
        lacks = False
        if channels is not None:
            assert channels.exchange is not None
            self._gradients.recover()
            lacks = version not in mirror.survey(channels.exchange)
        lacking, founded = gather_rows(engine.communicator, [float(lacks), float(self.founded)]).sum(0).tolist()
        if lacking:
            if founded:
                start_anew(self._loss(version, mirror.lost() if lacks else ""))
            return  # the initial state is made again
        if channels is None:
            return
        try:
            run_released(lambda: mirror.restore(version))
        finally:
            self._gradients.rebind()
        self.keep(version)

    def close(self) -> None:
        """Ends the mirror's thread and forgets all copies."""
        self._mirror.close()

    def _loss(self, version: int, found: str) -> str:
        """What is lost, in words."""
        place = parallel_state.get_data_parallel_rank() if parallel_state.is_initialized() else None
        why = found or "workers of another shard of the model say so"
        back = (
            f"the task goes on from the checkpoint of step {self.saved}; steps lost: {version - self.saved}"
            if self.saved is not None
            else f"no checkpoint was written in this run; steps lost: up to {version}"
        )
        return (
            f"the optimizer's shards of step {version} are not all there any more, as a worker has died together with "
            f"all that kept its copy (copies={self._redundancy.copies}): {why} (data-parallel rank {place}); {back}"
        )


def _node(engine: Engine) -> str:
    """Label of this worker's machine."""
    world = engine.world
    return world.nodes[world.rank] if world.nodes else ""


def check_redundancy(redundancy: Redundancy | None, *, distributed: bool) -> Redundancy | None:
    """What the strategy was given, or what it takes without; None if there are no shards.

    Raises:
        ConfigError: it cannot be had in the strategy.
    """
    if not distributed:
        if redundancy is not None:
            raise ConfigError(
                f"redundancy={redundancy!r} is for optimizer shards: expected "
                "ddp=DistributedDataParallelConfig(use_distributed_optimizer=True) with it"
            )
        return None
    redundancy = Redundancy(overlap=False) if redundancy is None else redundancy
    if redundancy.overlap or redundancy.every != 1:
        raise ConfigError(
            f"redundancy={redundancy!r}: the unicron_megatron strategy redoes no committed step, so each waits for its "
            "copies; expected overlap=False and every=1"
        )
    return redundancy
