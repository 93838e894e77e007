"""Detection of states that differ between workers: found by a digest in the commit, healed or stopped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import lightning.pytorch as pl
from torch import Tensor, nn
from torch.optim import Optimizer

from unicron_lightning.errors import ConfigError
from unicron_lightning.replica.step import ReplicaStep
from unicron_lightning.strategies.state.comparison import shared_state
from unicron_lightning.worker.agreement import check_parameters
from unicron_lightning.worker.digest import NO_DIGEST, StateDigest, part_of, parts_of
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.step import GradientStep

if TYPE_CHECKING:
    from unicron_lightning.strategies.fault_tolerant import FaultTolerantStrategy

OnDivergence = Literal["heal", "stop"]
_CHOICES: Final = get_args(OnDivergence)
_PLAIN: Final = (bool, int, float, str, type(None))


class Divergence:
    """Compares the workers' states: parameters, buffers and rates at intervals, and all when a worker has joined.

    Args:
        every: number of steps between two comparisons; 0: none is made.
        on_divergence: ``heal``: a worker that differs from most exits, and its successor receives the others'
            state; ``stop``: the task ends.

    Raises:
        ConfigError: for a value that is not allowed.
    """

    def __init__(self, every: int, on_divergence: OnDivergence) -> None:
        if every < 0:
            raise ConfigError(f"digest_every={every!r}: expected a number of steps, or 0 for never")
        if on_divergence not in _CHOICES:
            raise ConfigError(f"on_divergence={on_divergence!r}: expected 'heal' or 'stop'")
        self._every = every
        self._stops = on_divergence == "stop"
        self._whole = self._joined = False

    def expect(self, *, joined: bool) -> None:
        """Compare all of the state before the next step.

        Args:
            joined: whether this worker has joined; otherwise another one has.
        """
        self._whole, self._joined = True, joined

    def digest(self, strategy: FaultTolerantStrategy) -> StateDigest:
        """Return the digest of this worker's state before a step; `NO_DIGEST` where it is not compared."""
        trainer, whole, joined = strategy.trainer, self._whole, self._joined
        if not self._due(strategy.engine):
            return NO_DIGEST
        names = {id(parameter): name for name, parameter in strategy.module.named_parameters()}
        parts = {**parts_of(_tensors(strategy.module)), **_settings(strategy.optimizers, names)}
        further = {**parts_of(_states(strategy.optimizers, names)), **_rest(trainer, names)} if whole else {}
        return StateDigest(parts=parts, further=further, joined=joined)

    def shard_digest(self, engine: Engine, shard: Callable[[], Mapping[str, Tensor]]) -> StateDigest:
        """Return the digest of this worker's parts of the parameters, of a model that is spread over workers.

        Args:
            engine: of this worker.
            shard: returns the parts, by name.
        """
        joined = self._joined
        return StateDigest(parts=parts_of(shard()), joined=joined) if self._due(engine) else NO_DIGEST

    def _due(self, engine: Engine) -> bool:
        whole = self._whole
        self._whole = self._joined = False
        if not self._every or engine.world.size == 1:
            return False
        return whole or (engine.step > 0 and engine.step % self._every == 0)

    def check(self, operation: GradientStep | ReplicaStep[Any], engine: Engine) -> None:
        """Raise `ParametersDiffer` on the workers that must exit after a committed step."""
        world = engine.world
        check_parameters(operation.difference, world.rank, world.nodes, engine.step, stops=self._stops)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters, and buffers of the state dict: others may be caches, which ranks make as they need them."""
    saved = module.state_dict().keys()
    parameters = dict(module.named_parameters())
    return {**parameters, **{name: buffer for name, buffer in module.named_buffers() if name in saved}}


def _settings(optimizers: list[Optimizer], names: Mapping[int, str]) -> dict[str, int]:
    """Return a number for each setting of each parameter group, and for its parameters."""
    found = {}
    for number, optimizer in enumerate(optimizers):
        for place, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                plain = [names.get(id(each), "?") for each in value] if key == "params" else _plain(value)
                found[f"{key} of group {place} of optimizer {number}"] = part_of(plain)
    return found


def _states(optimizers: list[Optimizer], names: Mapping[int, str]) -> dict[str, Tensor]:
    """Return the tensors of the optimizers' states."""
    found = {}
    for number, optimizer in enumerate(optimizers):
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                if isinstance(value, Tensor):
                    found[f"{key} of {names.get(id(parameter), '?')} in optimizer {number}"] = value
    return found


def _rest(trainer: pl.Trainer, names: Mapping[int, str]) -> dict[str, int]:
    """Return numbers for which parameters need gradients, the schedules, the scaler and the counters.

    The states of callbacks and data are left out: they may have values of their rank, such as a time.
    """
    frozen = [names[id(each)] for each in trainer.lightning_module.parameters() if not each.requires_grad]
    found = {"requires_grad": part_of(frozen)}
    for number, config in enumerate(trainer.lr_scheduler_configs):
        for key, value in shared_state(config.scheduler).items():
            found[f"{key} of scheduler {number}"] = part_of(_plain(value))
    for key, value in (trainer.precision_plugin.state_dict() or {}).items():
        found[f"{key} of the scaler"] = part_of(_plain(value))
    return {**found, "trainer.global_step": part_of(trainer.global_step)}


def _plain(value: Any) -> Any:
    """Return plain data that has the same `repr` on two workers if the value is equal; objects are left out."""
    if isinstance(value, Tensor):
        return value.detach().cpu().reshape(-1).tolist()
    if isinstance(value, Mapping):
        return [(_plain(key), _plain(each)) for key, each in value.items()]
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if isinstance(value, _PLAIN) else type(value).__qualname__
