"""States of a Megatron task in its agents' memory: the parts of each shard of TP x PP.

Without the distributed optimizer the workers of a shard have equal states, and each stages a share. With it each one
stages its own part of the optimizer's state. In a new life every worker gets all parts of its shard, takes from them
what belongs to it in the present number of replicas, and loads it after the task has begun as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from unicron_lightning.megatron.grid import Shape
from unicron_lightning.megatron.model import ShardModel
from unicron_lightning.replica.fabric import run_released
from unicron_lightning.replica.member import ReplicaMember
from unicron_lightning.strategies.state.replica_memory import ReplicaDivision
from unicron_lightning.worker.communication.communicator import gather_bytes
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.operations import Indivisible
from unicron_lightning.worker.state_parts import DividedState, OwnState, joined

if TYPE_CHECKING:
    from unicron_lightning.strategies.megatron.parallel import MegatronParallel


class GridDivision(ReplicaDivision):
    """Divides the state of a Megatron model.

    Args:
        grid: the parallelism that it belongs to.
    """

    def __init__(self, grid: MegatronParallel) -> None:
        super().__init__(grid.strategy, lambda: grid.member)
        self._grid = grid
        self._restored: RestoreShard | None = None

    @property
    def _model(self) -> ShardModel:
        return self._grid.member.model

    @property
    def equal(self) -> bool:  # type: ignore[override]
        """Whether the workers of a shard have equal states."""
        return self._model.keeper is None

    @override
    def divide(self, state: Callable[[], dict[str, Any]]) -> DividedState:
        speaks = self.shard == 0 and (self.equal or self.place.replica == 0)
        own = {"shard": self._model.plain_state(self.shard), "loops": state() if speaks else None}
        return replace((DividedState if self.equal else OwnState).of(own), layout=self._layout())

    @override
    def joined(self, parts: Sequence[bytes]) -> dict[str, Any]:
        if self.equal:
            return {**joined(parts), "others": []}
        states = [joined([part]) for part in parts]
        loops = next((each["loops"] for each in states if each["loops"] is not None), None)
        return {"shard": states[0]["shard"], "others": [each["shard"] for each in states[1:]], "loops": loops}

    @override
    def check(self, state: Mapping[str, Any]) -> None:
        super().check(state)
        keeper, shards = self._model.keeper, [state["shard"], *state["others"]]
        if not self._model.fits(state["shard"]):
            raise LookupError("the tensors have other shapes than those of this worker")
        if keeper is not None and not keeper.complete([each["optimizer"] for each in shards]):
            raise LookupError("parts of the optimizer's state are missing")

    @override
    def load(self, state: dict[str, Any], step: int) -> None:
        """Keep the state for `settle`: Megatron builds the optimizer's main parameters at the start of the task."""
        self._restored = RestoreShard(self._grid.member, state, step)

    def settle(self) -> None:
        """Load what was restored, together with all other members, once the task has begun."""
        restored, self._restored = self._restored, None
        if restored is not None:
            self.strategy.engine.run(restored)

    @override
    def describe(self) -> list[Any]:
        config, shape = self._model.config, self._grid.shape
        sizes = [getattr(config, name, None) for name in ("num_layers", "hidden_size", "ffn_hidden_size")]
        return [shape.tensor, shape.pipeline, self._model.keeper is not None, str(config.params_dtype), *sizes]


class RestoreShard(Indivisible):
    """Loads the state of this worker's shard; spares receive theirs from other workers.

    Args:
        member: this worker's connections and shard.
        state: as of `GridDivision.joined`.
        step: optimizer steps done in it.
    """

    name = "memory_restore"

    def __init__(self, member: ReplicaMember[Shape, ShardModel], state: Mapping[str, Any], step: int) -> None:
        self._member = member
        self._state = state
        self._step = step

    def attempt(self, engine: Engine) -> bytes:
        fabric, state = self._member.fabric, self._state
        engine.fault("memory_restore", engine.step)
        if fabric.channels is not None:
            run_released(lambda: self._member.model.load_plain(state["shard"], state["others"], self._step))
        gather_bytes(engine.communicator, b"", engine.tag(self.name))
        if fabric.channels is not None:
            fabric.at = self._step
        return b""
