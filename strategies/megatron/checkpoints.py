"""State of a Megatron model beyond its workers: checkpoints on disk, and states in the memory of the task's agents.

Checkpoints are operations of all members, so that they survive failures.

In memory are the parts of each shard of TP x PP. Without the distributed optimizer the workers of a shard have equal
states, and each stages a share. With it each one stages its own part of the optimizer's state. In a new life every
worker gets all parts of its shard, takes from them what belongs to it in the present number of replicas, and loads it
after the task has begun as usual.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor
from typing_extensions import override

from unicron_lightning.checkpoints.files import located
from unicron_lightning.checkpoints.pieces import HeldCheckpoint
from unicron_lightning.megatron.checkpoint import held_checkpoint, load_folder, places_of_groups, rest
from unicron_lightning.megatron.model import ShardModel
from unicron_lightning.replica.fabric import run_released
from unicron_lightning.replica.member import ReplicaMember, next_version
from unicron_lightning.replica.mirror import Stored
from unicron_lightning.strategies.parallelism import CheckpointStore
from unicron_lightning.strategies.state.checkpointing import left_out, save_folder
from unicron_lightning.strategies.state.memory import SpreadDivision
from unicron_lightning.worker.communication.communicator import gather_bytes
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.operations import Indivisible
from unicron_lightning.worker.state_parts import DividedState, joined

if TYPE_CHECKING:
    from unicron_lightning.strategies.megatron.parallel import MegatronParallel


class LoadShard(Indivisible):
    """Loads the state of all active workers' shards; spares receive theirs from other workers later.

    The state gets a version above those that workers have, as in a further fit they may have done more steps.

    Args:
        name: of the operation.
        member: this worker's connections and shard.
        load: loads the state as a version, with the other workers.
        step: optimizer steps done in it.
    """

    def __init__(self, name: str, member: ReplicaMember[ShardModel], load: Callable[[int], None], step: int) -> None:
        self.name = name
        self._member = member
        self._load = load
        self._step = step

    def attempt(self, engine: Engine) -> bytes:
        engine.fault(self.name, engine.step)
        fabric, keeper = self._member.fabric, self._member.model.keeper
        known = gather_bytes(engine.communicator, json.dumps(fabric.at).encode(), engine.tag(f"{self.name} of"))
        version = next_version(known, self._step)
        if fabric.channels is not None:
            run_released(partial(self._load, version))
        gather_bytes(engine.communicator, b"", engine.tag(self.name))
        if fabric.channels is not None:
            fabric.at = version
        if keeper is not None:
            keeper.ahead = version - self._step
        return b""


class GridCheckpoints(CheckpointStore):
    """Folders in Megatron's format, written by all workers.

    Args:
        grid: the parallelism that they belong to.
    """

    divided = True
    at_urls = False

    def __init__(self, grid: MegatronParallel) -> None:
        self._grid = grid
        self._resumes: str | None = None

    def save(self, checkpoint: dict[str, Any], filepath: Any, options: Any) -> str | None:
        """Write a folder in Megatron's format, with all workers (`unicron_lightning.megatron.checkpoint`)."""
        strategy, path = self._grid.strategy, located(filepath)
        if left_out(strategy, path):
            return None
        digest = save_folder(strategy, checkpoint, path, self._present_parts, partial(self._present, checkpoint))
        self.written(int(checkpoint["global_step"]))
        return digest

    def _present_parts(self) -> list[str]:
        """Name this worker's shard and, with the distributed optimizer, its range of the state."""
        shard, keeper = self._shard(), self._grid.member.model.keeper
        if keeper is None or not shard:
            return shard
        ring = keeper.mirror.ring
        return [f"{shard[0]} optimizer {ring.rank}/{len(ring.layouts)}", *shard]

    def _present(self, checkpoint: dict[str, Any]) -> HeldCheckpoint:
        """Return a checkpoint as this worker holds it, also after the end of the run."""
        model = self._grid.member.model
        *ranges, shard = self._present_parts()
        copies = None if model.keeper is None else dict.fromkeys(ranges, model.keeper.present())
        return held_checkpoint(model.ddps, model.optimizer, checkpoint, shard, copies)

    def held_parts(self) -> Sequence[str]:
        """Name this worker's shard and, with the distributed optimizer, its ranges of the state and copies of others'.

        The ranges are named by all that determines them. Nothing is named by a spare.
        """
        return [*self._copies(), *self._shard()]

    def _shard(self) -> list[str]:
        place, fabric = self._grid.member.fabric.place, self._grid.member.fabric
        return [] if place is None or place.replica is None else [str(fabric.own_shard)]

    def _copies(self) -> dict[str, Stored]:
        """Return ranges of the optimizer's state by the names of their parts: this worker's own first."""
        keeper, fabric, shard = self._grid.member.model.keeper, self._grid.member.fabric, self._shard()
        if keeper is None or not shard:
            return {}
        assert fabric.at is not None
        copies, size = keeper.mirror.copies(fabric.at), len(keeper.mirror.ring.layouts)
        return {f"{shard[0]} optimizer {owner}/{size}": copy for owner, copy in copies.items()}

    def held(self, checkpoint: dict[str, Any]) -> HeldCheckpoint:
        model, shard = self._grid.member.model, self._shard()
        if not shard:
            return HeldCheckpoint(tensors={}, files={})
        copies = None if model.keeper is None else self._copies()
        if copies is not None and not copies:
            raise LookupError(f"no copy of this worker's ranges after {self._grid.member.fabric.at} steps")
        return held_checkpoint(model.ddps, model.optimizer, checkpoint, shard[0], copies)

    def steady(self) -> Iterator[Tensor]:
        yield from self._grid.member.model.kept()
        yield from (copy.data for copy in self._copies().values())

    def written(self, step: int) -> None:
        keeper = self._grid.member.model.keeper
        if keeper is not None:
            keeper.saved = step

    def load(self, path: Any, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Load Lightning's part; `load_model` reads the model's once it exists."""
        folder = str(Path(str(path)).absolute())
        found = rest(folder)
        self._resumes = folder
        return found

    def load_model(self, checkpoint: Any, load: Callable[[], None]) -> None:
        """Load model and optimizer of the path given to `load`, if any; joiners call this, too."""
        path, self._resumes = self._resumes, None
        if path is None:
            return
        member, model, step = self._grid.member, self._grid.member.model, int(checkpoint["global_step"])
        places, number = places_of_groups(path, model.optimizer)
        for state in checkpoint.get("lr_schedulers", ()):
            rearrange_rates(state, places, number)

        def read(version: int) -> None:
            load_folder(path, model.ddps, model.optimizer)
            if model.keeper is not None:
                model.keeper.replace(version, step)

        self._grid.strategy.engine.run(LoadShard("load_checkpoint", member, read, step))


def rearrange_rates(state: dict[str, Any], places: Sequence[int], number: int) -> None:
    """Give a scheduler's state a value for each group of parameters of this run; Megatron has others for experts that
    are divided otherwise.

    Args:
        state: of torch's scheduler, changed in place.
        places: the number of each group in the checkpoint.
        number: of the groups there.
    """
    for name, value in state.items():
        if name in _OF_GROUPS and isinstance(value, list) and len(value) == number:
            state[name] = [value[place] for place in places]
        for inner in value if name == "_schedulers" else ():
            rearrange_rates(inner, places, number)


_OF_GROUPS: Final = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs")
"""Names under which torch's schedulers have a value for each group."""


class GridDivision(SpreadDivision):
    """Divides the state of a Megatron model.

    Args:
        grid: the parallelism that it belongs to.
    """

    def __init__(self, grid: MegatronParallel) -> None:
        super().__init__(grid.strategy, partial(getattr, grid, "member"))
        self._grid = grid
        self._restored: LoadShard | None = None

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
        shard, keeper = {"shard": self.shard, **self._model.plain_state()}, self._model.keeper
        if keeper is not None:
            shard["optimizer"] = keeper.plain_state()
        own = {"shard": shard, "loops": state() if speaks else None}
        return replace(DividedState.of(own), layout=self._layout())

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
        model = self._model

        def load(version: int) -> None:
            model.load_plain(state["shard"])
            if model.keeper is not None:
                model.keeper.load_plain([each["optimizer"] for each in (state["shard"], *state["others"])], version)

        self._restored = LoadShard("memory_restore", self._grid.member, load, step)

    def settle(self) -> None:
        """Load what was restored, together with all other members, once the task has begun."""
        restored, self._restored = self._restored, None
        if restored is not None:
            self.strategy.engine.run(restored)

    @override
    def describe(self) -> list[Any]:
        config, shape = self._model.config, self._grid.shape
        sizes = [getattr(config, name, None) for name in ("num_layers", "hidden_size", "ffn_hidden_size")]
        experts = [shape.expert, config.num_moe_experts] if self._model.experts else []
        further = (("virtual", shape.virtual), ("context", shape.context))
        named = [f"{name}={size}" for name, size in further if size > 1]
        layout = [shape.tensor, shape.pipeline, self._model.keeper is not None]
        return [*layout, str(config.params_dtype), *sizes, *experts, *named]
