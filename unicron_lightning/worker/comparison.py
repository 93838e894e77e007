"""Comparison of the workers of a task: properties that all must share, and states that may diverge.

Properties are compared when workers meet. States that differ are found by a digest in the commit, and healed or
stopped.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, Protocol, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unicron_lightning.errors import ConfigError
from unicron_lightning.worker import codec
from unicron_lightning.worker.agreement import (
    NO_DIGEST,
    StateDigest,
    check_agreement,
    check_parameters,
    digest,
    part_of,
    parts_of,
)
from unicron_lightning.worker.codec import unpack_parts
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.operations import Agreement
from unicron_lightning.worker.session import Session
from unicron_lightning.worker.step import Step

_OF_EARLIER_FITS: Final = ("requires_grad", "optimizer", "scheduler", "hparams")
"""Items that an earlier ``fit`` may have changed, which a joiner has left out: it gets them from the members."""
_OF_SCHEDULERS: Final = ("base_lrs", "last_epoch", "_step_count", "_last_lr")
"""State of each of torch's schedulers."""
_PLAIN: Final = (bool, int, float, str, type(None))


class TaskHost(Protocol):
    """A strategy or a loop: has this worker's part in its task, once a run has begun."""

    @property
    def session(self) -> Session: ...


class Comparison:
    """This worker's description of itself, and its comparison with those of the others.

    Args:
        host: has this worker's session.
        active: whether workers are compared at all.

    Attributes:
        described: empty if they are not.
    """

    def __init__(self, host: TaskHost, *, active: bool) -> None:
        self._host = host
        self._active = active
        self.described: dict[str, str] = {}

    def begin(self, describe: Callable[[], dict[str, str]]) -> None:
        """Describe the model of a ``fit``."""
        self.described = describe() if self._active else {}

    @property
    def has_data(self) -> bool:
        """Whether the training data are described, if workers are compared."""
        return "data order" in self.described or not self._active

    def add_data(self, describe: Callable[[], dict[str, str]]) -> None:
        """Add the training data to the description."""
        if self._active:
            self.described = {**self.described, **describe()}

    def agree(self, name: str) -> None:
        """Compare with the other workers, once all have arrived.

        Raises:
            WorkersDiffer: if this worker differs.
        """
        if not self._active:
            return
        said = self._host.session.engine.run(Agreement(f"agree on {name}", lambda rank: codec.encode(self.described)))
        check_agreement(self.described, [codec.decode(part) for part in unpack_parts(said)], node=self._node())

    def check(self, expected: dict[str, str] | None) -> None:
        """Compare with the description of a worker that has the state.

        Raises:
            WorkersDiffer: if this worker differs.
        """
        if self._active and expected:
            left = _OF_EARLIER_FITS if self._host.session.fits > 1 else ()
            mine, theirs = ({k: v for k, v in each.items() if k not in left} for each in (self.described, expected))
            check_agreement(mine, [theirs], node=self._node())

    def _node(self) -> str:
        world = self._host.session.engine.world
        return world.nodes[world.rank] if world.nodes else "local"


def shared_state(scheduler: Any) -> dict[str, Any]:
    """Return the items of a scheduler's state that must be equal on all ranks; a script's class may have others.

    Of torch's classes it is all of it. Of another one it is what torch's `LRScheduler` has, the arguments of the
    constructors, and whole numbers and texts. Paths, objects, and further floats such as times may be of the rank: a
    difference that matters shows in the rates.
    """
    state, kind = scheduler.state_dict(), type(scheduler)
    if not isinstance(state, Mapping):
        return {}
    items = {str(key): value for key, value in state.items()}
    if kind.__module__.startswith(("torch.", "lightning.")):
        return items
    made = [vars(each)["__init__"] for each in kind.__mro__[:-1] if "__init__" in vars(each)]
    known = {*_OF_SCHEDULERS, *(name for each in made for name in inspect.signature(each).parameters)}
    return {key: value for key, value in items.items() if _is_shared(value, (int, float) if key in known else (int,))}


def _is_shared(value: Any, numbers: tuple[type, ...]) -> bool:
    """Whether a value consists of such numbers, and of texts that are no paths."""
    if isinstance(value, Mapping):
        return all(_is_shared(each, numbers) for pair in value.items() for each in pair)
    if isinstance(value, (list, tuple)):
        return all(_is_shared(each, numbers) for each in value)
    if isinstance(value, torch.Tensor):
        return float in numbers or not value.is_floating_point()
    return isinstance(value, numbers) or (isinstance(value, str) and os.sep not in value)


def describe_parameters(module: nn.Module) -> dict[str, str]:
    """Describe the parameters of a module, and which of them are frozen."""
    named = [(name, tuple(p.shape), p.stride(), str(p.dtype)) for name, p in module.named_parameters()]
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    return {
        "parameters": f"{len(named)}, digest of names, shapes, strides and dtypes {digest(named)}",
        "requires_grad": f"False for {len(frozen)} parameters, digest of their names {digest(frozen)}",
    }


def describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Return class and settings of an optimizer as a text."""
    groups = [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
    return f"{type(optimizer).__qualname__}({'; '.join(plain_text(group) for group in groups)})"


def plain_text(values: Mapping[str, Any] | None) -> str:
    """Return a text of a state; a scheduler may have none."""
    return "" if values is None else ", ".join(f"{key}={value}" for key, value in sorted(_plain(values)))


def _plain(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Select numbers and texts, and lists of them: paths may differ between nodes, and objects have no stable text."""
    for key, value in values.items():
        item = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        if isinstance(item, str) and os.sep in item:
            continue
        if isinstance(item, _PLAIN) or (
            isinstance(item, list | tuple) and all(isinstance(each, _PLAIN) for each in item)
        ):
            yield str(key), repr(item)


OnDivergence = Literal["heal", "stop"]
_CHOICES: Final = get_args(OnDivergence)


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

    def digest(
        self,
        engine: Engine,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        rest: Callable[[Mapping[int, str]], dict[str, int]],
    ) -> StateDigest:
        """Return the digest of this worker's state before a step; `NO_DIGEST` where it is not compared.

        Args:
            engine: of this worker.
            module: as each worker holds it.
            optimizers: of the module.
            rest: given the names of parameters by their identity, returns numbers of the rest of the state.
        """
        whole, joined = self._whole, self._joined
        if not self._due(engine):
            return NO_DIGEST
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        parts = {**parts_of(saved_tensors(module)), **_settings(optimizers, names)}
        further = {**parts_of(_states(optimizers, names)), **rest(names)} if whole else {}
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

    def check(self, operation: Step[Any], engine: Engine) -> None:
        """Raise `ParametersDiffer` on the workers that must exit after a committed step."""
        world = engine.world
        check_parameters(operation.difference, world.rank, world.nodes, engine.step, stops=self._stops)


def saved_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters, and buffers of the state dict: others may be caches, which ranks make as they need them."""
    saved = module.state_dict().keys()
    parameters = dict(module.named_parameters())
    return {**parameters, **{name: buffer for name, buffer in module.named_buffers() if name in saved}}


def _settings(optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> dict[str, int]:
    """Return a number for each setting of each parameter group, and for its parameters."""
    found = {}
    for number, optimizer in enumerate(optimizers):
        for place, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                plain = [names.get(id(each), "?") for each in value] if key == "params" else comparable(value)
                found[f"{key} of group {place} of optimizer {number}"] = part_of(plain)
    return found


def _states(optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> dict[str, Tensor]:
    """Return the tensors of the optimizers' states."""
    found = {}
    for number, optimizer in enumerate(optimizers):
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                if isinstance(value, Tensor):
                    found[f"{key} of {names.get(id(parameter), '?')} in optimizer {number}"] = value
    return found


def comparable(value: Any) -> Any:
    """Return plain data that has the same `repr` on two workers if the value is equal; objects are left out."""
    if isinstance(value, Tensor):
        return value.detach().cpu().reshape(-1).tolist()
    if isinstance(value, Mapping):
        return [(comparable(key), comparable(each)) for key, each in value.items()]
    if isinstance(value, (list, tuple)):
        return [comparable(each) for each in value]
    return value if isinstance(value, _PLAIN) else type(value).__qualname__
