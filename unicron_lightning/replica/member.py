"""A worker of a world of replicas from epoch to epoch: its connections, its shard of the model, and the shard's state
at the start, after a replacement, and at the end for spares.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, Protocol, TypeVar

import torch

from unicron_lightning.replica.channels import Channels
from unicron_lightning.replica.fabric import ReplicaFabric, run_released
from unicron_lightning.worker.communication.communicator import gather_bytes
from unicron_lightning.worker.delivery import deliver
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.operations import Indivisible
from unicron_lightning.worker.rows import shares_of
from unicron_lightning.worker.state_parts import DividedState


class ReplicaGradients(Protocol):
    """Sums of gradients over the micro-batches of completed calls, before and after their reduction over replicas.

    Attributes:
        reduced: number of buckets, in their order, whose sums over the replicas can be kept if the others are summed
            again; 0 where further calls would add to them.
    """

    @property
    def reduced(self) -> int: ...

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

    @property
    def stages(self) -> bool:
        """Whether the update communicates, and so is staged before the commit."""

    def begin(self) -> None:
        """Reset the gradients."""

    def recover(self, reduced: int) -> None:
        """After a failure: restore the gradients of this worker's completed calls, and keep ``reduced`` buckets."""

    def finalize(self) -> None:
        """Process the reduced gradients within the replica, and compute their norm."""

    def stage(self) -> None:
        """Compute an update that communicates, again after a failure; parameters and states stay as they are, or the
        keeper has them.
        """

    def update(self) -> None:
        """Step the optimizer, or take what was staged; without communication."""

    def unify(self) -> None:
        """Equalise the initial parameters of all replicas."""

    def state(self, *, whole: bool = False) -> DividedState:
        """State of this shard for other workers that hold it; it shares the memory of the model and its optimizer.

        Args:
            whole: with parameters that the keeper would restore otherwise.
        """

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load the state of another worker."""


class ShardOperation(Indivisible):
    """An operation in which all workers do the same with their shards.

    Args:
        fabric: provides this worker's place and progress.
        model: its shard.
    """

    def __init__(self, fabric: ReplicaFabric, model: ReplicaModel) -> None:
        self._fabric = fabric
        self._model = model


class InitialState(ShardOperation):
    """All replicas start from the first one's parameters."""

    name = "initial_state"

    def attempt(self, engine: Engine) -> bytes:
        channels, keeper = self._fabric.channels, self._model.keeper
        if channels is not None and keeper is not None:
            keeper.found(engine, channels)
        if channels is not None:
            run_released(self._model.unify)
        if channels is not None and keeper is not None:
            keeper.keep(0)
        gather_bytes(engine.communicator, b"", engine.tag(self.name))
        return b""


class LastState(ShardOperation):
    """At the end of a fit, workers with an older state of their shard, as spares have, receive the newest.

    It goes through all members, since a spare has no connections of its own. No member leaves before all have theirs.
    """

    name = "last_state"

    def attempt(self, engine: Engine) -> bytes:
        words = gather_bytes(engine.communicator, json.dumps(self._fabric.at).encode(), engine.tag(self.name))
        steps: set[int | None] = {json.loads(word) for word in words}
        if len(steps) > 1:
            newest = max(at for at in steps if at is not None)
            send_shards(engine, self._fabric, self._model, newest, lacks=self._fabric.at != newest, whole=True)
            gather_bytes(engine.communicator, b"", engine.tag(self.name))
        return b""


def transfer(engine: Engine, fabric: ReplicaFabric, model: ReplicaModel) -> None:
    """Send the newest states of the shards to the epoch's workers that lack them; a collective of all members.

    Raises:
        CommunicatorAborted: a member failed.
    """
    place = fabric.place
    assert place is not None
    if place.layout.stale:
        send_shards(engine, fabric, model, place.layout.newest, lacks=place.rank in place.layout.stale)


def send_shards(
    engine: Engine, fabric: ReplicaFabric, model: ReplicaModel, newest: int, *, lacks: bool, whole: bool = False
) -> None:
    """Send the states of shards after ``newest`` steps from the workers that have them to those that lack them;
    ``whole`` as of `ReplicaModel.state`.
    """
    state = model.state(whole=whole) if fabric.at == newest and not lacks else None
    if lacks:
        fabric.at = None
    places = engine.world.places
    found = deliver(engine.communicator, places, "shards state", state, lacks=lacks, subject=fabric.own_shard)
    if found is not None:
        model.load_state(found.state)
        fabric.at = newest


def next_version(known: Sequence[bytes], step: int) -> int:
    """Return the version of a state that is loaded: above those that workers have, as a further fit may load an
    earlier step than they are at.

    Args:
        known: each worker's version as JSON; null: it has none.
        step: optimizer steps done in the state.
    """
    versions: list[int] = [at for word in known if (at := json.loads(word)) is not None]
    return max(step, 1 + max(versions))


_Model = TypeVar("_Model", bound=ReplicaModel)


class ReplicaMember(Generic[_Model]):
    """Brings this worker's shard of the model into each epoch.

    Args:
        fabric: its connections.
        connect: gives an epoch's connections to the model.
        leave: takes connections from the model, of a worker that becomes a spare.
    """

    def __init__(
        self,
        fabric: ReplicaFabric,
        connect: Callable[[_Model, Channels], None],
        leave: Callable[[], None],
    ) -> None:
        self.fabric = fabric
        self._connect = connect
        self._leave = leave
        self._model: _Model | None = None

    @property
    def model(self) -> _Model:
        """This worker's shard."""
        assert self._model is not None, "no model has been built"
        return self._model

    @model.setter
    def model(self, model: _Model) -> None:
        self._model = model

    @property
    def spares(self) -> int:
        """Number of members of the newest epoch that are in no replica."""
        return 0 if self.fabric.place is None else self.fabric.place.spares

    def found(self, engine: Engine) -> None:
        """Begin the task with the same parameters in all replicas."""
        self.enter(engine)
        engine.run(InitialState(self.fabric, self.model))
        self.founded()

    def founded(self) -> None:
        """Note that all workers have the task's initial state, or a later one."""
        if self.model.keeper is not None:
            self.model.keeper.founded = True

    @torch.enable_grad()
    def enter(self, engine: Engine) -> None:
        """Give the epoch's connections to the model, and transfer this shard's state to workers that need it.

        Gradients are enabled even in a validation, because models attach hooks to the graph.

        Raises:
            CommunicatorAborted, EpochChanged: a member failed.
        """
        fabric, model = self.fabric, self._model
        channels, place = fabric.enter(), fabric.place
        if channels is not None:
            channels.record_waits(engine.activity)
        if model is None:
            return
        if channels is None:
            self._leave()
        else:
            self._connect(model, channels)
            fabric.watch()
        engine.check()
        transfer(engine, fabric, model)
        if model.keeper is not None and place is not None and place.built and engine.world.epoch > 0:
            model.keeper.enter(engine, channels, place.layout.newest)

    def share(self, micro_batches: range, counts: Sequence[int] | None = None) -> list[int]:
        """The micro-batches of this worker's replica, of ``counts`` for each, if all declared ones are there."""
        place = self.fabric.place
        if place is None or place.replica is None:
            return []
        replicas = len(place.layout.replicas)
        complete = replicas == self.fabric.shape.replicas
        return shares_of(micro_batches, replicas, counts if complete else None)[place.replica]

    def update(self) -> None:
        """Update after the commit, without other workers."""
        if self.fabric.phase == "ready":
            self.model.update()
            self.fabric.stepped()

    def finish(self, engine: Engine) -> None:
        """End a fit with the newest state of this worker's shard, also if it is a spare."""
        engine.run(LastState(self.fabric, self.model))

    def close(self) -> None:
        """End the process's part."""
        if self._model is not None and self._model.keeper is not None:
            self._model.keeper.close()
        self._leave()
