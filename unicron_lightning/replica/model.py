"""The part of a replica's model that one worker holds, as the operations of a replica use it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from unicron_lightning.replica.channels import Channels
from unicron_lightning.worker.engine import Engine


class ReplicaGradients(Protocol):
    """Sums of gradients over the micro-batches of completed calls, before and after their reduction over replicas."""

    def apart(self) -> AbstractContextManager[None]:
        """Accumulate from zero inside; at the end the earlier sums are added."""

    def reduce(self) -> None:
        """Sum over the workers of this shard in all replicas, keeping this worker's own sums.

        Raises:
            CommunicatorAborted, RuntimeError: a reduction has failed.
        """

    def settle(self) -> None:
        """Wait until the library has released the buffers, after the connections were cut."""


class StateKeeper(Protocol):
    """Copies of a worker's optimizer shard on others, where a replica does not have the whole state.

    Attributes:
        founded: whether all workers have the task's initial state.
    """

    founded: bool

    def found(self, engine: Engine, channels: Channels) -> None:
        """Distribute the state over the replicas at the task's start."""

    def keep(self, version: int) -> None:
        """Return when the state after ``version`` steps is safe; a collective of the workers of this shard."""

    def enter(self, engine: Engine, channels: Channels | None, version: int) -> None:
        """Set state and parameters for an epoch's replicas, to the newest state that a member has committed.

        Args:
            engine: has the epoch's communicator.
            channels: None for a spare.
            version: number of steps in that state.
        """

    def close(self) -> None:
        """Drop all copies."""


class ReplicaModel(Protocol):
    """One worker's shard of the model, with its gradients and optimizer."""

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""

    @property
    def gradients(self) -> ReplicaGradients:
        """Sums of gradients."""

    @property
    def keeper(self) -> StateKeeper | None:
        """Copies of the optimizer's state; None if each replica has the whole state."""

    @property
    def grad_norm(self) -> float:
        """Norm of the last finalized gradients over the whole model, before clipping."""

    def begin(self) -> None:
        """Reset the gradients."""

    def recover(self) -> None:
        """After a failure: restore the gradients of this worker's completed calls."""

    def finalize(self) -> None:
        """Process the reduced gradients within the replica, and compute their norm."""

    def update(self) -> None:
        """Step the optimizer; without communication unless there is a keeper."""

    def unify(self) -> None:
        """Equalise the initial parameters of all replicas."""

    def state(self) -> bytes:
        """State of this shard for another worker that holds it."""

    def load_state(self, data: bytes) -> None:
        """Load the `state` of another worker."""
