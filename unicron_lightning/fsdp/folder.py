"""The state of a sharded model: whole tensors from the shards of a replica, and back, and folders with its shards.

Each worker's part of a tensor is one block of it (`mesh.region`): a range of rows, and with tensor parallelism perhaps
of columns. An optimizer's state may be nested, and have tensors of another shape than the parameter's, such as the
factors of Shampoo, of which each lane has some rows. In a folder (`checkpoints.index`) each worker writes its own part.
To read a part needs no communication. Workers must share the file system.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from unicron_lightning.checkpoints import files
from unicron_lightning.checkpoints.files import MODEL, by_name, by_number
from unicron_lightning.checkpoints.index import StoredFolder
from unicron_lightning.checkpoints.pieces import HeldCheckpoint, HeldTensor
from unicron_lightning.errors import ConfigError
from unicron_lightning.fsdp.mesh import holds_first, local_shard, region, with_local_shard
from unicron_lightning.worker.model_state import are_converted, keep_types

OPTIMIZER: Final = files.OPTIMIZER + "0"


def whole_parameters(module: nn.Module, shards: Sequence[Sequence[Tensor]]) -> dict[str, Tensor]:
    """Return the state dict of a module with whole tensors.

    Args:
        module: this worker's shard of it.
        shards: of each worker of a replica, in order: its parts of the parameters and then of the buffers.
    """
    own = [*module.parameters(), *module.buffers()]
    whole = {id(tensor): _whole(parts, tensor) for tensor, parts in zip(own, zip(*shards, strict=True), strict=True)}
    return {name: whole[id(tensor)] for name, tensor in module.state_dict(keep_vars=True).items()}


def load_parameters(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy this worker's parts of whole tensors into a module.

    Raises:
        KeyError: a tensor is missing.
    """
    with torch.no_grad():
        for name, tensor in module.state_dict(keep_vars=True).items():
            local_shard(tensor).copy_(shard_of(state[name], tensor))


def whole_optimizer(shards: Sequence[dict[str, Any]], optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state dict with whole tensors.

    Args:
        shards: its state dicts with the parts of each worker of a replica, in order.
        optimizer: of this worker.
    """
    parameters = _parameters_of(optimizer)

    def whole(key: int, value: Any, *others: Any) -> Any:
        parts, parameter = [value, *others], parameters[key]
        if _is_part(value):
            return _whole([each[_PART] for each in parts], with_local_shard(parameter, value[_PART], value[_SHAPE]))
        return _whole(parts, parameter) if has_elements(value) else value

    return with_values(shards[0], whole, *shards[1:])


def optimizer_shard(optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state dict with this worker's parts of its tensors."""
    parameters = _parameters_of(optimizer)

    def own(key: int, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        part = local_shard(value.detach())
        other = isinstance(value, DTensor) and value.shape != parameters[key].shape
        return {_PART: part, _SHAPE: [*value.shape]} if other else part

    return with_values(optimizer.state_dict(), own)


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any], *, whole: bool, converted: bool = False) -> None:
    """Load a state dict with whole tensors, or with this worker's parts of them; ``converted`` as of `keep_types`."""
    parameters = _parameters_of(optimizer)

    def own(key: int, value: Any) -> Any:
        parameter = parameters[key]
        if _is_part(value):
            return with_local_shard(parameter, value[_PART], value[_SHAPE])
        if not has_elements(value) or isinstance(value, DTensor):
            return value
        return state_shard(parameter, value) if whole else with_local_shard(parameter, value)

    divided = with_values(state, own)
    optimizer.load_state_dict(divided)
    keep_types(optimizer, divided, converted=converted)


def with_values(state: Mapping[str, Any], change: Callable[..., Any], *others: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict with other values.

    Args:
        state: the state dict.
        change: gets a parameter's number, a value that is not nested, and those at the same place of the others.
        others: further state dicts.
    """
    entries = {
        key: tree_map(partial(change, key), values, *(each["state"][key] for each in others), is_leaf=_is_part)
        if isinstance(key, int)
        else values  # what parameters have in common
        for key, values in state["state"].items()
    }
    return {"state": entries, "param_groups": state["param_groups"]}


def shard_of(whole: Tensor, tensor: Tensor) -> Tensor:
    """This worker's part of a whole tensor that is divided as another one."""
    return whole[region(tensor)] if isinstance(tensor, DTensor) else whole


def state_shard(parameter: Tensor, whole: Tensor) -> Tensor:
    """This worker's shard of a tensor of a parameter's state."""
    like = with_local_shard(parameter, whole[:0], whole.shape)
    return with_local_shard(parameter, shard_of(whole, like), whole.shape)


def has_elements(value: Any) -> bool:
    """Whether a value of an optimizer's state is a tensor to divide."""
    return isinstance(value, Tensor) and value.dim() > 0


_PART, _SHAPE = "unicron_part", "unicron_shape"
"""Keys of this worker's part of a tensor that has not the shape of its parameter, and of the whole's shape."""


def _is_part(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {_PART, _SHAPE}


def _whole(parts: Sequence[Tensor], tensor: Tensor) -> Tensor:
    """Return the whole of a tensor that is divided as another one is, from the parts of all workers of a replica."""
    if not isinstance(tensor, DTensor):
        return parts[0]
    whole = parts[0].new_empty(tensor.shape)
    for shard, part in enumerate(parts):
        whole[region(tensor, shard)] = part
    return whole


# ---- folders


def held_part(
    module: nn.Module, optimizers: Sequence[Optimizer], shard: int, rest: Mapping[str, Any]
) -> HeldCheckpoint:
    """Return the parts that this worker is the first to hold, and on the first worker all that is not divided."""
    held = HeldCheckpoint.whole(_named(module, optimizers), rest)
    own = []
    for each in held.tensors[""]:
        piece = _own_piece(each)
        if piece.data.numel() and holds_first(each.data) if isinstance(each.data, DTensor) else shard == 0:
            own.append(piece)
    return replace(held, tensors={str(shard): own})


def load_module(folder: Path, module: nn.Module) -> None:
    """Read this worker's shards of the parameters and buffers, whatever number of shards has written them.

    Raises:
        ConfigError: the folder lacks a tensor, has one of another shape, or an index that names something else.
    """
    own = {f"{MODEL}.{name}": tensor.detach() for name, tensor in module.state_dict(keep_vars=True).items()}
    StoredFolder(folder).fill(_own_piece(HeldTensor.of(name, tensor)) for name, tensor in own.items())


def read_optimizer_part(folder: Path, module: nn.Module) -> dict[str, Any]:
    """Read this worker's shards of the optimizer's state, by names of parameters; nothing if the folder has none.

    The optimizer may not have its groups yet: `load_optimizer_part` gives them to it.
    """
    parameters, known = module.state_dict(keep_vars=True), StoredFolder(folder)
    made: dict[int, Tensor] = {}

    def make(name: str, place: Sequence[str | int]) -> HeldTensor:
        entry, about = known.entries[name], parameters.get(str(place[2])) if place[1] == "state" else None
        size, dtype = tuple(entry.size), entry.properties.dtype
        if not isinstance(about, DTensor) or not size:
            return HeldTensor.of(name, torch.empty(size, dtype=dtype))
        like = with_local_shard(about, local_shard(about)[:0], size)
        assert isinstance(like, DTensor)
        block = region(like)
        data = torch.empty([each.stop - each.start for each in block], dtype=dtype, device=local_shard(about).device)
        made[id(data)] = with_local_shard(about, data, size)
        return HeldTensor(name, data, size, tuple(each.start for each in block))

    own: dict[str, Any] = known.read(lambda place: place[0] == OPTIMIZER, make).get(OPTIMIZER, {})
    saved = {name: getattr(known.entries.get(f"{MODEL}.{name}"), "properties", None) for name in parameters}
    divided: dict[str, Any] = tree_map(lambda each: made.get(id(each), each), own)
    return divided and {**divided, _CONVERTED: are_converted(module, saved)}


_CONVERTED: Final = "unicron_converted"
"""Key of whether the parameters had other types in the folder."""


def load_optimizer_part(own: Mapping[str, Any], module: nn.Module, optimizer: Optimizer) -> None:
    """Load what `read_optimizer_part` has read.

    Raises:
        ConfigError: the optimizer has other groups of parameters.
    """
    if not own:
        return
    expected, groups = _group_names(module, optimizer), own["param_groups"]
    if [sorted(group["params"]) for group in groups] != [sorted(group) for group in expected]:
        raise ConfigError(
            "the checkpoint has other groups of the optimizer's parameters than the module: "
            f"{[group['params'] for group in groups]}, expected {expected}"
        )
    load_optimizer(optimizer, by_number(own, expected), whole=False, converted=own[_CONVERTED])


def _named(module: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """The state of a module and its optimizers, by names, as torch's `get_optimizer_state_dict` gives it."""
    state: dict[str, Any] = {MODEL: {name: each.detach() for name, each in module.state_dict(keep_vars=True).items()}}
    for number, each in enumerate(optimizers):
        state[f"{files.OPTIMIZER}{number}"] = by_name(each.state_dict(), _group_names(module, each))
    return state


def _group_names(module: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """The name of each parameter of an optimizer, by group; the first one of a parameter with several."""
    names: dict[int, str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), name)
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def _own_piece(each: HeldTensor) -> HeldTensor:
    """Return this worker's piece of a tensor that may be divided."""
    if not isinstance(each.data, DTensor):
        return each
    return replace(each, data=local_shard(each.data), offsets=tuple(part.start for part in region(each.data)))
