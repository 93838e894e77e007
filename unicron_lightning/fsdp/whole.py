"""Whole tensors from the shards of a replica, and back: parameters, buffers and the optimizer's state.

FSDP2 divides a tensor along its first axis as `torch.chunk` does, so the whole is the concatenation of the shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from unicron_lightning.fsdp.mesh import local_shard, with_local_shard


def whole_parameters(module: nn.Module, shards: Sequence[Sequence[Tensor]]) -> dict[str, Tensor]:
    """Return the state dict of a module with whole tensors.

    Args:
        module: this worker's shard of it.
        shards: of each shard, in order: its parts of the parameters and then of the buffers.
    """
    own = [*module.parameters(), *module.buffers()]
    whole = {
        id(tensor): torch.cat(list(parts)) if isinstance(tensor, DTensor) else parts[0]
        for tensor, parts in zip(own, zip(*shards, strict=True), strict=True)
    }
    return {name: whole[id(tensor)] for name, tensor in module.state_dict(keep_vars=True).items()}


def load_parameters(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy this worker's parts of whole tensors into a module.

    Raises:
        KeyError: a tensor is missing.
    """
    with torch.no_grad():
        for name, tensor in module.state_dict(keep_vars=True).items():
            local_shard(tensor).copy_(shard_of(state[name], tensor))


def whole_optimizer(shards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return an optimizer's state dict with whole tensors, from those with the parts of each shard, in order."""
    return with_values(shards[0], lambda key, name, _: _whole([each["state"][key][name] for each in shards]))


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any], *, whole: bool) -> None:
    """Load a state dict with whole tensors, or with this worker's parts of them."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def own(key: int, _name: str, value: Any) -> Any:
        if not _divided(value):
            return value
        parameter = parameters[int(key)]
        return with_local_shard(parameter, shard_of(value, parameter) if whole else local_shard(value))

    optimizer.load_state_dict(with_values(state, own))


def with_values(state: Mapping[str, Any], change: Callable[[int, str, Any], Any]) -> dict[str, Any]:
    """Return an optimizer's state dict with other values: ``change`` gets a parameter's number, a name, and a value."""
    entries = {
        key: {name: change(key, name, value) for name, value in values.items()}
        for key, values in state["state"].items()
    }
    return {"state": entries, "param_groups": state["param_groups"]}


def shard_of(whole: Tensor, tensor: Tensor) -> Tensor:
    """This worker's part of a whole tensor that is divided as another one."""
    if not isinstance(tensor, DTensor):
        return whole
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this worker is in its replica's mesh"
    parts, [shard] = whole.chunk(mesh.size(), 0), coordinate
    return parts[shard] if shard < len(parts) else whole[:0]


def _divided(value: Any) -> bool:
    """Whether an entry of an optimizer's state has a value for each element of its parameter."""
    return isinstance(value, Tensor) and value.dim() > 0


def _whole(parts: Sequence[Any]) -> Any:
    return torch.cat(list(parts)) if _divided(parts[0]) else parts[0]
