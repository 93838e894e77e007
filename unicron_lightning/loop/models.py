"""How the workers of a run hold its models: each has all of them. `sharded` has the other way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from unicron_lightning.checkpoints.agent_memory import StateDivision
from unicron_lightning.checkpoints.files import MODEL, OPTIMIZER, by_name
from unicron_lightning.checkpoints.pieces import HeldCheckpoint
from unicron_lightning.checkpoints.saving import WriteFile
from unicron_lightning.data.passes import PassBatches
from unicron_lightning.errors import ConfigError
from unicron_lightning.loop.evaluation import LoopPass
from unicron_lightning.loop.loop_steps import LoopSteps
from unicron_lightning.loop.registered import RegisteredObjects
from unicron_lightning.worker.engine import World
from unicron_lightning.worker.model_state import group_names, share_initial
from unicron_lightning.worker.reproducible import digest_of
from unicron_lightning.worker.rows import shares_of
from unicron_lightning.worker.session import Session

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from unicron_lightning.loop.run import Run

logger = logging.getLogger(__name__)


class WholeModels:
    """Each worker holds all models. The methods are in the order of a run's calls.

    Args:
        run: whose models they are.

    Attributes:
        registered: what takes part in the run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.registered = RegisteredObjects()

    def open(self, micro_batches: int) -> tuple[Session, bool]:
        """Return this process's session, and whether it is new.

        Args:
            micro_batches: of a step.
        """
        return Session.of_process(self._run.device, micro_batches, self.enter)

    def begin(self, session: Session) -> None:
        """Begin with the run's session."""

    @property
    def mesh(self) -> DeviceMesh:
        """See `Run.mesh`."""
        raise ConfigError("run.mesh of models that are not sharded: expected Run(..., shard_size=...)")

    def steps(self, bucket_bytes: int, *, overlap: bool, reproducible: bool) -> LoopSteps:
        """Return what runs the steps."""
        return LoopSteps(self._run, bucket_bytes, overlap=overlap, reproducible=reproducible)

    def enter(self, world: World) -> None:
        """Enter an epoch, before any work in it."""
        if world.epoch > 0:
            told = {"epoch": world.epoch, "kind": world.kind, "rank": world.rank, "size": world.size}
            logger.info("world_entered epoch=%(epoch)d kind=%(kind)s rank=%(rank)d size=%(size)d", told)

    def build(self) -> None:
        """Prepare the models for the state of others."""

    def found(self, *, reads: bool) -> None:
        """Give all founders the same initial state when a loop begins.

        Args:
            reads: whether a checkpoint follows, or a loop before had a state.
        """
        if not reads and self._run.world_size > 1:
            share_initial([*self.registered.module.parameters(), *self.registered.module.buffers()], self._run.engine)

    def share(self, micro_batches: range) -> list[int]:
        """Return this worker's micro-batches of a step in the present world."""
        world = self._run.engine.world
        return [micro_batches[number] for number in shares_of(range(len(micro_batches)), world.size)[world.rank]]

    def own(self, in_full_step: Sequence[int]) -> list[int]:
        """Return this worker's micro-batches of a step of streams; ``in_full_step`` as of `shares_of`."""
        world = self._run.engine.world
        return shares_of(range(len(in_full_step)), world.size, in_full_step=in_full_step)[world.rank]

    def evaluation(self, batches: PassBatches, function: Callable[[Any], Any], place: tuple[int, int, int]) -> LoopPass:
        """Return a pass over data; the arguments are those of `LoopPass`."""
        return LoopPass(self._run.engine, self.registered.module, batches, function, place)

    def division(self) -> StateDivision:
        """Return how a state is divided in the agents' memory."""
        return StateDivision(self._run)

    def restored(self, state: dict[str, Any], common: bytes) -> Mapping[str, Any]:
        """Return the state of the run, given one of `division` and the part of it that all workers need."""
        return state

    def held_parts(self) -> Sequence[str]:
        """See `CheckpointsBeside.held_parts`."""
        return ()

    def held(self, state: Mapping[str, Any], rest: Mapping[str, Any]) -> HeldCheckpoint:
        """Return a checkpoint in the format of the strategies' folders, as this worker holds it.

        Args:
            state: of the run.
            rest: what is neither model nor optimizer.
        """
        registered, model = self.registered, state["models"]
        held: dict[str, Any] = {MODEL: {f"{name}.{key}": each for name in model for key, each in model[name].items()}}
        for number, (name, optimizer) in enumerate(registered.optimizers.items()):
            held[f"{OPTIMIZER}{number}"] = by_name(state["optimizers"][name], group_names(optimizer, registered.module))
        return HeldCheckpoint.whole(held, rest)

    def digest(self) -> str:
        """Return the digest of the models' states."""
        return digest_of(self.registered.models())

    def at_boundary(self) -> None:
        """Act between two steps, after a possible change of worlds."""

    def writing(self, write: Callable[[Mapping[str, Any]], str]) -> WriteFile:
        """Return the operation that writes a checkpoint.

        Args:
            write: writes it and returns its digest, given those parts of the state that `RegisteredObjects` lacks.
        """
        return WriteFile(lambda _: write({}))

    def finish(self) -> None:
        """End a loop after its last step."""
