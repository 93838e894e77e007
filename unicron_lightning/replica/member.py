"""A worker of a world of replicas from epoch to epoch: its connections, and its shard of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch

from unicron_lightning.replica.channels import Channels
from unicron_lightning.replica.fabric import FabricShape, ReplicaFabric
from unicron_lightning.replica.model import ReplicaModel
from unicron_lightning.replica.start import InitialState, LastState, transfer
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.rows import shares_of

_Shape = TypeVar("_Shape", bound=FabricShape)
_Model = TypeVar("_Model", bound=ReplicaModel)


class ReplicaMember(Generic[_Shape, _Model]):
    """Brings this worker's shard of the model into each epoch.

    Args:
        fabric: its connections.
        connect: gives an epoch's connections to the model.
        leave: takes connections from the model, of a worker that becomes a spare.
    """

    def __init__(
        self, fabric: ReplicaFabric[_Shape], connect: Callable[[_Model, Channels], None], leave: Callable[[], None]
    ) -> None:
        self.fabric = fabric
        self._connect = connect
        self._leave = leave
        self._model: _Model | None = None
        self._is_over = False

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
        transfer(fabric, model)
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
        """Update after the commit, without other workers. With a keeper, the update was before."""
        if self.fabric.phase == "ready":
            if self.model.keeper is None:
                self.model.update()
            self.fabric.stepped()

    def finish(self, engine: Engine) -> None:
        """End a fit with the newest state of this worker's shard, also if it is a spare."""
        engine.run(LastState(self.fabric, self.model))

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Have the epoch's connections in the model, also after the end of the run; for workers of replicas.

        Raises:
            CommunicatorAborted, EpochChanged: a member failed.
        """
        if not self._is_over:
            yield
            return
        channels = self.fabric.channels
        assert channels is not None, "a spare has no connections"
        self._connect(self.model, channels)
        try:
            yield
        finally:
            self._leave()

    def close(self) -> None:
        """End the run."""
        self._is_over = True
        if self._model is not None and self._model.keeper is not None:
            self._model.keeper.close()
        self._leave()
