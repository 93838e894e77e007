"""The state of a sharded model: whole tensors from the shards of a replica, and back, and folders with its shards.

Each worker's part of a tensor is one block of it (`mesh.region`): a range of rows, and with tensor parallelism perhaps
of columns. In a folder (`checkpoints.index`) each worker writes its own part. To read a part needs no communication.
Workers must share the file system.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from unicron_lightning.checkpoints import files
from unicron_lightning.checkpoints.files import MODEL, by_name, by_number
from unicron_lightning.checkpoints.index import StoredFolder
from unicron_lightning.checkpoints.pieces import HeldCheckpoint, HeldTensor
from unicron_lightning.errors import ConfigError
from unicron_lightning.fsdp.mesh import holds_first, local_shard, region, with_local_shard
from unicron_lightning.worker.model_state import keep_types

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

    def whole(key: int, name: str, value: Any) -> Any:
        return _whole([each["state"][key][name] for each in shards], parameters[int(key)]) if _divided(value) else value

    return with_values(shards[0], whole)


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any], *, whole: bool) -> None:
    """Load a state dict with whole tensors, or with this worker's parts of them."""
    parameters = _parameters_of(optimizer)

    def own(key: int, _name: str, value: Any) -> Any:
        if not _divided(value):
            return value
        parameter = parameters[int(key)]
        return with_local_shard(parameter, shard_of(value, parameter) if whole else local_shard(value))

    optimizer.load_state_dict(with_values(state, own))
    keep_types(optimizer, state)


def with_values(state: Mapping[str, Any], change: Callable[[int, str, Any], Any]) -> dict[str, Any]:
    """Return an optimizer's state dict with other values: ``change`` gets a parameter's number, a name, and a value."""
    entries = {
        key: {name: change(key, name, value) for name, value in values.items()}
        for key, values in state["state"].items()
    }
    return {"state": entries, "param_groups": state["param_groups"]}


def shard_of(whole: Tensor, tensor: Tensor) -> Tensor:
    """This worker's part of a whole tensor that is divided as another one."""
    return whole[region(tensor)] if isinstance(tensor, DTensor) else whole


def _divided(value: Any) -> bool:
    """Whether an entry of an optimizer's state has a value for each element of its parameter."""
    return isinstance(value, Tensor) and value.dim() > 0


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

    def make(name: str, place: Sequence[str | int]) -> HeldTensor:
        entry, about = known.entries[name], parameters.get(str(place[2])) if place[1] == "state" else None
        size, dtype = tuple(entry.size), entry.properties.dtype
        if isinstance(about, DTensor) and entry.size == about.shape and size:
            piece = _own_piece(HeldTensor.of(name, about))
            return replace(piece, data=torch.empty_like(piece.data, dtype=dtype))
        return HeldTensor.of(name, torch.empty(size, dtype=dtype))

    own: dict[str, Any] = known.read(lambda place: place[0] == OPTIMIZER, make).get(OPTIMIZER, {})
    return own


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
    load_optimizer(optimizer, by_number(own, expected), whole=False)


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
