"""Models, optimizers and other objects that a loop's script has registered, as one state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn import Parameter
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unicron_lightning import __version__
from unicron_lightning.errors import ConfigError
from unicron_lightning.worker import codec
from unicron_lightning.worker.agreement import part_of
from unicron_lightning.worker.buckets import TrainedParameters
from unicron_lightning.worker.comparison import (
    comparable,
    describe_optimizer,
    describe_parameters,
    plain_text,
    shared_state,
)
from unicron_lightning.worker.model_state import (
    are_converted,
    group_names,
    keep_types,
    layer_settings,
    regroup,
    set_layers,
)
from unicron_lightning.worker.module_buffers import restore_unsaved, unsaved

RESERVED: Final = "unicron_loop"
"""Key of a checkpoint for all that is no model."""
OF_SHARDS: Final = "others_of_shards"
"""Key for the states of the script's own objects by shard, which may have values of a shard's parameters."""


class RegisteredObjects:
    """What takes part in a run.

    Attributes:
        module: has the registered modules as its children.
        optimizers: by name.
        others: objects with a state that are neither modules nor optimizers, by name.
        untrained: parameters that need gradients, but no optimizer has: their gradients are this rank's own.
        scaler: of the losses; None: they are not scaled.
    """

    def __init__(self) -> None:
        self.module = nn.Module()
        self.optimizers: dict[str, Optimizer] = {}
        self.others: dict[str, Any] = {}
        self.untrained: list[Parameter] = []
        self.scaler: GradScaler | None = None
        self._trained = TrainedParameters()

    def add(self, name: str, value: Any) -> None:
        """Add an object.

        Raises:
            ConfigError: the name is taken, or the object cannot take part.
        """
        taken = {*self.optimizers, *self.others, RESERVED}
        if name in taken or hasattr(self.module, name):
            raise ConfigError(f"register({name}={_named(value)}): the name {name!r} is taken; expected another one")
        if isinstance(value, nn.Module):
            _check_module(name, value)
            self.module.add_module(name, value)
        elif isinstance(value, Optimizer):
            self.optimizers[name] = value
        elif callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
            self.others[name] = value
            if isinstance(value, GradScaler):
                self.scaler = value
        else:
            raise ConfigError(
                f"register({name}={_named(value)}): expected a module, an optimizer, or an object with state_dict() "
                "and load_state_dict()"
            )

    def check(self) -> None:
        """Require a model, and optimizers of its parameters.

        Raises:
            ConfigError: there is none, or an optimizer has other parameters.
        """
        known = {id(parameter) for parameter in self.module.parameters()}
        if not known or not self.optimizers:
            raise ConfigError(
                f"registered are the modules {[*dict(self.module.named_children())]} and the optimizers "
                f"{[*self.optimizers]}: expected at least one of each, by run.register(model=..., optimizer=...)"
            )
        for name, optimizer in self.optimizers.items():
            strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
            if strangers:
                raise ConfigError(
                    f"the optimizer {name!r} has a parameter of shape {tuple(strangers[0].shape)} that no registered "
                    "module has: register all modules that it trains"
                )

    def trained(self, *, anew: bool) -> list[tuple[str, Parameter]]:
        """Return names and parameters that an optimizer has and that need gradients, in the models' order."""
        optimizers = [*self.optimizers.values()]
        optimized = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        found = self._trained.find(self.module, optimizers, anew=anew)
        self.untrained = [parameter for _, parameter in found if id(parameter) not in optimized]
        return [each for each in found if id(each[1]) in optimized]

    # ---- the state

    def models(self) -> dict[str, Any]:
        """Return the state of each module, by name."""
        return {name: module.state_dict() for name, module in self.module.named_children()}

    def rest(self) -> dict[str, Any]:
        """Return the state without `models`."""
        return {
            "optimizers": {name: self._optimizer_state(each) for name, each in self.optimizers.items()},
            "groups": {name: group_names(each, self.module) for name, each in self.optimizers.items()},
            "others": {name: each.state_dict() for name, each in self.others.items()},
            "requires_grad": [parameter.requires_grad for parameter in self.module.parameters()],
            "buffers": unsaved(self.module),
            "layers": layer_settings(self.module),
        }

    def load(self, models: Mapping[str, Any], rest: Mapping[str, Any]) -> None:
        """Restore the state of another worker, or of a checkpoint.

        Raises:
            ConfigError: it has other objects than are registered.
        """
        mine = {*models_of(self.module), *self.optimizers, *self.others}
        theirs = {*models, *rest["optimizers"], *rest["others"]}
        if mine != theirs:
            raise ConfigError(f"registered are {sorted(mine)}, but the state has {sorted(theirs)}: expected the same")
        converted = any(are_converted(each, models[name]) for name, each in self.module.named_children())
        for name, module in self.module.named_children():
            self._load_model(module, models[name])
        for parameter, needed in zip(self.module.parameters(), rest["requires_grad"], strict=True):
            parameter.requires_grad_(needed)
        restore_unsaved(self.module, rest["buffers"])
        for name, optimizer in self.optimizers.items():
            if "groups" in rest:  # not in checkpoints of earlier versions
                regroup(optimizer, self.module, rest["groups"][name])
            self._load_optimizer(optimizer, rest["optimizers"][name], converted=converted)
        for name, state in self._others_in(rest).items():
            self.others[name].load_state_dict(state)
        set_layers(self.module, rest["layers"])

    def _others_in(self, rest: Mapping[str, Any]) -> Mapping[str, Any]:
        return others_of(rest, 0, 1)

    def _optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return optimizer.state_dict()

    def _load_model(self, module: nn.Module, state: Mapping[str, Any]) -> None:
        module.load_state_dict(state)

    def _load_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any], *, converted: bool) -> None:
        optimizer.load_state_dict(dict(state))
        keep_types(optimizer, state, converted=converted)

    # ---- comparison

    def describe(self) -> dict[str, str]:
        """Describe what must be equal on all workers."""
        versions = (torch.__version__, __version__)
        return {
            "versions": "torch {}, unicron-lightning {}".format(*(each.partition("+")[0] for each in versions)),
            **describe_parameters(self.module),
            "optimizer": ", ".join(f"{name} {describe_optimizer(each)}" for name, each in self.optimizers.items()),
            "scheduler": ", ".join(
                f"{name} {type(each).__qualname__}({plain_text(shared_state(each))})" for name, each in self._shared()
            ),
            "others": ", ".join(f"{name} {type(each).__qualname__}" for name, each in self.others.items()),
        }

    def numbers(self, names: Mapping[int, str]) -> dict[str, int]:
        """Return numbers of the state beside tensors of modules and optimizers, as of `Divergence.digest`."""
        frozen = [names[id(each)] for each in self.module.parameters() if not each.requires_grad]
        found = {"requires_grad": part_of(frozen)}
        for name, each in self._shared():
            found |= {f"{key} of {name}": part_of(comparable(value)) for key, value in shared_state(each).items()}
        return found

    def own(self) -> dict[str, Any]:
        """Return the states of the script's own objects, which may have values of a shard's parameters."""
        shared = dict(self._shared())
        return {name: each.state_dict() for name, each in self.others.items() if name not in shared}

    def _shared(self) -> Iterator[tuple[str, Any]]:
        """Yield the objects whose states are equal on all workers."""
        for name, each in self.others.items():
            if isinstance(each, LRScheduler | GradScaler):
                yield name, each


def others_of(rest: Mapping[str, Any], shard: int, shards: int) -> Mapping[str, Any]:
    """Return the states of a state's other objects for a worker.

    Args:
        rest: the state without its models.
        shard: of the worker.
        shards: workers of a replica.

    Raises:
        ConfigError: they differ by shard, and there were more or fewer.
    """
    found: Sequence[Mapping[str, Any]] = rest.get(OF_SHARDS, [{}])
    if len(found) != shards and len({codec.encode(each) for each in found}) > 1:
        raise ConfigError(
            f"the state has objects of {len(found)} shards, which differ: {sorted(found[0])}; expected "
            f"shard_size={len(found)}, found {shards}"
        )
    return {**rest["others"], **found[shard if len(found) == shards else 0]}


def models_of(module: nn.Module) -> list[str]:
    """Return the names of a module's children."""
    return [name for name, _ in module.named_children()]


def _check_module(name: str, module: nn.Module) -> None:
    if isinstance(module, DistributedDataParallel | DataParallel):
        raise ConfigError(
            f"register({name}={_named(module)}): step.run() reduces the gradients; register the module without its "
            "wrapper, and leave out init_process_group()"
        )
    for place, child in module.named_modules():
        if any(each.__module__.startswith("torchmetrics.") for each in type(child).__mro__):
            raise ConfigError(
                f"register({name}=...): {place!r} is a {_named(child)} of torchmetrics, whose state would be that of "
                "this rank's micro-batches; return values from the function of step.run() instead"
            )


def _named(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
