"""State that torch's state dicts have not, or do not keep: the initial one, types of scalars, settings of layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from unicron_lightning.worker import codec
from unicron_lightning.worker.codec import unpack_parts
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.operations import Agreement


def share_initial(tensors: Sequence[Tensor], engine: Engine) -> None:
    """Copy rank 0's parameters and buffers to all ranks, seeded alike or not."""
    with torch.no_grad():
        operation = Agreement("initial_state", lambda rank: codec.encode(tensors) if rank == 0 else b"")
        values = codec.decode(unpack_parts(engine.run(operation))[0])
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)


def keep_types(optimizer: Optimizer, state: Mapping[str, Any], *, converted: bool = False) -> None:
    """Give an optimizer's loaded state the types that it has in a state dict, and its parameters' order of memory.

    Torch converts all tensors but the number of steps to the type of the parameter. This may round them, as scalars of
    ASGD, NAdam and Rprop, and float32 moments of parameters in bfloat16. The worker would differ from those whose state
    it has. An optimizer that loads in a way of its own keeps what it makes of tensors. Fused updates take elements in
    the order of memory, which no encoded state has.

    Args:
        optimizer: has loaded ``state``.
        state: its `state_dict` elsewhere; without values if those are in shards.
        converted: whether the parameters had other types there. Then only scalars keep theirs.
    """
    parameters = dict(enumerate(parameter for group in optimizer.param_groups for parameter in group["params"]))
    scalars_only = converted or type(optimizer).load_state_dict is not Optimizer.load_state_dict
    for key, values in state.get("state", {}).items():  # torch allows further keys, of what parameters have in common
        if (parameter := parameters.get(key)) is not None and parameter in optimizer.state:
            own = _with_types(optimizer.state[parameter], values, scalars_only=scalars_only)
            optimizer.state[parameter] = tree_map(partial(in_order_of, parameter), own)


def _with_types(loaded: Any, value: Any, *, scalars_only: bool) -> Any:
    """Return what was loaded, with the types of a value, which may be nested."""
    if isinstance(value, Tensor) and isinstance(loaded, Tensor):
        kept = loaded.dtype == value.dtype or loaded.shape != value.shape or (scalars_only and value.dim() > 0)
        return loaded if kept else value.detach().clone().to(loaded.device)
    if isinstance(value, Mapping) and isinstance(loaded, Mapping):
        common = loaded.keys() & value.keys()
        return {
            **loaded,
            **{name: _with_types(loaded[name], value[name], scalars_only=scalars_only) for name in common},
        }
    if type(loaded) in (list, tuple) and isinstance(value, list | tuple) and len(value) == len(loaded):
        pairs = (_with_types(*pair, scalars_only=scalars_only) for pair in zip(loaded, value, strict=True))
        return type(loaded)(pairs)
    return loaded


def in_order_of(parameter: Tensor, value: Any) -> Any:
    """Return a tensor of the shape of a parameter with its order of memory, e.g. channels last; other values as they
    are.
    """
    if not isinstance(value, Tensor) or value.shape != parameter.shape or value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def are_converted(module: nn.Module, saved: Mapping[str, Any]) -> bool:
    """Whether parameters have other types than in a saved state dict of the module, or than what describes it."""
    return any(
        getattr(saved.get(name), "dtype", parameter.dtype) != parameter.dtype
        for name, parameter in module.named_parameters()
    )


def group_names(optimizer: Optimizer, module: nn.Module) -> list[list[str]]:
    """Return the names of the parameters of each group of an optimizer; those of no module get one."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [
        [names.get(id(each), f"{at}.{place}") for place, each in enumerate(group["params"])]
        for at, group in enumerate(optimizer.param_groups)
    ]


def regroup(optimizer: Optimizer, module: nn.Module, groups: Sequence[Sequence[str]]) -> None:
    """Form the groups that `group_names` gave on another worker, whose script may have added some; their settings are
    loaded afterwards.
    """
    names = group_names(optimizer, module)
    if names == groups:
        return
    before = list(optimizer.param_groups)
    own = zip(chain(*names), (parameter for group in before for parameter in group["params"]), strict=True)
    known = {**dict(module.named_parameters()), **dict(own)}
    optimizer.param_groups.clear()
    for each in groups:
        optimizer.add_param_group({**before[0], "params": [known[name] for name in each]})


_PLAIN: Final = (bool, int, float, type(None))


def layer_settings(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the settings of the layers, by their names: of torch's all that are numbers, of others their mode.

    A joiner's layers are new ones. A hook may set a layer's mode, the probability of a dropout or the momentum of batch
    norm; `BaseFinetuning` starts and stops the tracking of statistics. No state dict has them.
    """
    return {name: dict(_settings_of_layer(layer)) for name, layer in module.named_modules()}


def set_layers(module: nn.Module, settings: Mapping[str, Mapping[str, Any]]) -> None:
    """Set what `layer_settings` gave on another worker."""
    for name, layer in module.named_modules():
        for key, value in settings.get(name, {}).items():
            if getattr(layer, key, None) != value:
                setattr(layer, key, value)


def _settings_of_layer(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    of_torch = any(
        each.__module__.startswith("torch.nn.modules") for each in type(layer).__mro__ if each is not nn.Module
    )
    for key, value in vars(layer).items():
        if key == "training" or (of_torch and not key.startswith("_") and isinstance(value, _PLAIN)):
            yield key, value
