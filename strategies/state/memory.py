"""Division of a Lightning module's state into the parts that agents keep in their memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from typing_extensions import override

from unicron_lightning.checkpoints.agent_memory import StateDivision
from unicron_lightning.replica.division import ReplicaDivision
from unicron_lightning.replica.member import ReplicaMember
from unicron_lightning.strategies.state import join_state
from unicron_lightning.worker import codec

if TYPE_CHECKING:
    from unicron_lightning.strategies.fault_tolerant import FaultTolerantStrategy


class WholeDivision(StateDivision):
    """Divides the state of a module that each worker holds as a whole.

    Args:
        strategy: provides engine, session and state.
    """

    def __init__(self, strategy: FaultTolerantStrategy) -> None:
        super().__init__(strategy)
        self.strategy = strategy

    def restore(self, trainer: pl.Trainer, state: dict[str, Any], common: bytes) -> dict[str, Any]:
        """Restore a checked state; return that of the loops, for `join_state.arrive`."""
        return join_state.resume_from(trainer, state)


class SpreadDivision(ReplicaDivision, WholeDivision):
    """Divides the state of a module that is spread over the workers of a replica.

    Args:
        strategy: provides engine, session and state.
        member: as of `ReplicaDivision`.
    """

    def __init__(self, strategy: FaultTolerantStrategy, member: Callable[[], ReplicaMember[Any]]) -> None:
        super().__init__(strategy, member, partial(getattr, strategy, "module"))
        self.strategy = strategy

    @override
    def restore(self, trainer: pl.Trainer, state: dict[str, Any], common: bytes) -> dict[str, Any]:
        loops = join_state.resume_from(trainer, codec.decode(common))
        self.load(state, int(loops["checkpoint"]["global_step"]))
        return loops
