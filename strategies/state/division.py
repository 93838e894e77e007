"""How a state in the agents' memory is divided between the workers of a task: of whole models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

from unicron_lightning import wire
from unicron_lightning.strategies.state import join_state
from unicron_lightning.worker.engine import World
from unicron_lightning.worker.staging import StagedVersion, Staging
from unicron_lightning.worker.state_parts import DividedState, SharePart, joined, staged_parts

if TYPE_CHECKING:
    from unicron_lightning.strategies.fault_tolerant import FaultTolerantStrategy


class StateDivision:
    """Divides the state of a model that each worker holds as a whole: its parts are shares of equal bytes.

    Args:
        strategy: provides engine, session and state.
    """

    shards = 1
    """Shards of the model."""
    shard = 0
    """This worker's shard."""
    equal = True
    """Whether the workers of a shard have equal states."""

    def __init__(self, strategy: FaultTolerantStrategy) -> None:
        self.strategy = strategy

    def workers(self, world: World) -> Sequence[Sequence[int]]:
        """Return the ranks of the workers of each shard, in the order of replicas."""
        return [range(world.size)]

    def plan(self, world: World, partners: int) -> tuple[SharePart, ...]:
        """Return all parts of a version, in order."""
        return staged_parts(self.workers(world), world.places, partners, equal=self.equal)

    def divide(self, state: Callable[[], dict[str, Any]]) -> DividedState:
        """Return this worker's state, given a function that returns that of a joiner.

        Raises:
            NotPlainData: it holds objects.
        """
        return DividedState.of(state())

    def stage(self, staging: Staging, state: Callable[[], dict[str, Any]], partners: int) -> StagedVersion | None:
        """Copy this worker's parts at a step boundary, together with all other members.

        Returns:
            Copies for the agent; None if another worker's failure has prevented them.

        Raises:
            OSError, MemoryError: there is not enough memory.
            NotPlainData: the state holds objects.
        """
        engine = self.strategy.engine
        plan = self.plan(engine.world, partners)
        return staging.stage(self.divide(state), engine.step, engine.world, plan)

    def joined(self, parts: Sequence[bytes]) -> dict[str, Any]:
        """Return the state of this worker's shard, given its parts in order.

        Raises:
            ValueError: the bytes are not those of a state's parts.
        """
        state: dict[str, Any] = joined(parts)
        return state

    def refusal(self, version: wire.StateVersion) -> str | None:
        """Return the reason why a version does not fit this task; the same on all members."""
        return None

    def check(self, state: Mapping[str, Any]) -> None:
        """Check the state of this worker's shard before it is restored.

        Raises:
            FitPassed: it belongs to another ``fit`` of the script.
            LookupError: it is none.
        """
        self.strategy.session.check_fit(state["fit"])

    def common(self, state: dict[str, Any]) -> bytes:
        """Return the encoded part of the state of this worker's shard that all workers need; b"" for none."""
        return b""

    def restore(self, trainer: pl.Trainer, state: dict[str, Any], common: bytes) -> dict[str, Any]:
        """Restore a checked state; return that of the loops, for `join_state.arrive`."""
        return join_state.resume_from(trainer, state)
