"""Updates that need whole matrices, such as Muon's, of a model whose workers hold shards.

Each matrix has an owner among the shards of a replica. Before the commit of a step the owners receive the shards of
gradients, parameters and states of their matrices, run the script's optimizer on whole tensors, and send each shard its
part of the new values. These are *staged*: parameters and states stay as they are until the step is committed, so a
worker that returns from a failed update has lost nothing, and the update is computed again. After the commit the staged
values are copied, without communication.

The owners compute what one process computes, so the result does not depend on the number of shards. States stay
divided as the parameters, so checkpoints, joiners and other numbers of shards need nothing else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Muon, Optimizer

from unicron_lightning.errors import ConfigError
from unicron_lightning.fsdp.mesh import ShardGroup, holds_first, local_shard, region, with_local_shard
from unicron_lightning.worker import codec

ROUND_BYTES: Final = 1 << 26
"""Size of the matrices that an owner updates at a time."""


def needs_whole(optimizer: Optimizer) -> bool:
    """Whether an optimizer's update needs whole parameters, and its state has the shape of its parameters.

    These are Muon, classes with that in their names, such as one that updates other parameters by AdamW, and classes
    that say so themselves by the attribute ``needs_whole_parameters``.
    """
    named = any("muon" in each.__name__.lower() for each in type(optimizer).__mro__)
    return bool(getattr(optimizer, "needs_whole_parameters", isinstance(optimizer, Muon) or named))


@dataclass(frozen=True)
class _Staged:
    """New values of this worker's shard of a parameter.

    Attributes:
        parameter: as the optimizer has it.
        value: this worker's part.
        state: parts of tensors of the parameter's shape, by name.
        scalars: the other entries of the state.
    """

    parameter: nn.Parameter
    value: Tensor
    state: Mapping[str, Tensor]
    scalars: Mapping[str, Any]


class WholeUpdates:
    """Updates the matrices of an optimizer, each on one shard.

    Args:
        optimizer: of this worker's shards.
        group: of the replica's shards.

    Attributes:
        prepared: returns the part of a gradient to update with, e.g. clipped; it must not change its argument.
    """

    def __init__(self, optimizer: Optimizer, group: ShardGroup) -> None:
        self.prepared: Callable[[Tensor], Tensor] = lambda gradient: gradient
        self._optimizer = optimizer
        self._group = group
        self._staged: list[_Staged] = []

    @torch.no_grad()
    def stage(self) -> None:
        """Compute the update; a collective of the replica.

        Raises:
            ConfigError: the optimizer has state that is neither of the shape of a parameter nor a scalar.
            RuntimeError: the connections are closed.
        """
        self._staged = []
        for parameters, owners in self._rounds():
            self._staged += self._update(parameters, owners)

    @torch.no_grad()
    def apply(self) -> None:
        """Take the staged values, after the commit."""
        staged, self._staged = self._staged, []
        for each in staged:
            parameter, own = each.parameter, self._optimizer.state[each.parameter]
            local_shard(parameter).copy_(each.value)
            for name, part in each.state.items():
                if name in own:
                    local_shard(own[name]).copy_(part)
                else:
                    own[name] = with_local_shard(parameter, part)
            own.update(each.scalars)

    def discard(self) -> None:
        """Drop the staged values: the state of another worker is loaded."""
        self._staged = []

    def _rounds(self) -> Iterator[tuple[list[nn.Parameter], list[int]]]:
        """Yield parameters with gradients and the shards that own them, the same on all shards."""
        found = [each for group in self._optimizer.param_groups for each in group["params"] if each.grad is not None]
        shards = self._group.size()
        parameters: list[nn.Parameter] = []
        owners: list[int] = []
        loads = [0] * shards
        for each in found:
            owner = loads.index(min(loads))
            loads[owner] += each.numel() * each.element_size()
            parameters.append(each)
            owners.append(owner)
            if min(loads) >= ROUND_BYTES:
                yield parameters, owners
                parameters, owners, loads = [], [], [0] * shards
        if parameters:
            yield parameters, owners

    def _update(self, parameters: Sequence[nn.Parameter], owners: Sequence[int]) -> Iterator[_Staged]:
        shards, shard = self._group.size(), self._group.rank()
        state = self._optimizer.state
        divided = [_divided(self._optimizer, each, state.get(each, {})) for each in parameters]
        sent: list[list[Tensor]] = [[] for _ in range(shards)]
        for each, owner, names in zip(parameters, owners, divided, strict=True):
            assert each.grad is not None and isinstance(each, DTensor), "all parameters are sharded"
            if not holds_first(each):
                continue  # another worker of the lane has the same part
            values = (self.prepared(local_shard(each.grad)), local_shard(each))
            sent[owner] += [*values, *(local_shard(state[each][name]) for name in names)]
        own = [number for number, owner in enumerate(owners) if owner == shard]
        dtypes = [_dtypes(parameters[number], state, divided[number]) for number in own]
        expected = [
            [(_part(parameters[number], source), dtype) for number, kinds in zip(own, dtypes, strict=True)
             if _sends(parameters[number], source) for dtype in kinds]
            for source in range(shards)
        ]  # fmt: skip
        received = [iter(parts) for parts in self._exchange(sent, expected)]
        whole = []
        for number, kinds in zip(own, dtypes, strict=True):
            parameter = parameters[number]
            made = [torch.empty(parameter.shape, dtype=dtype, device=local_shard(parameter).device) for dtype in kinds]
            for source in range(shards):
                for tensor in made if _sends(parameter, source) else ():
                    tensor[_block(parameter, source)] = next(received[source])
            whole += made
        return self._send_back(parameters, owners, self._step(parameters, own, divided, iter(whole)))

    def _step(
        self,
        parameters: Sequence[nn.Parameter],
        own: Sequence[int],
        divided: Sequence[list[str]],
        whole: Iterator[Tensor],
    ) -> dict[int, tuple[nn.Parameter, dict[str, Any]]]:
        """Run the optimizer on whole tensors; return the new values with their states, by number of the parameter."""
        optimizer, state = self._optimizer, self._optimizer.state
        made: dict[int, nn.Parameter] = {}
        states: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        for number in own:
            gradient, value = next(whole), nn.Parameter(next(whole))
            value.grad, made[number] = gradient, value
            copied = {name: _copy(each) for name, each in state.get(parameters[number], {}).items()}
            states[value] = {**copied, **{name: next(whole) for name in divided[number]}}
        numbers = {id(each): number for number, each in enumerate(parameters)}
        groups = [(group, group["params"]) for group in optimizer.param_groups]
        try:
            optimizer.state = states
            for group, members in groups:
                group["params"] = [made[numbers[id(each)]] for each in members if numbers.get(id(each)) in made]
            type(optimizer).step(optimizer)  # not that of the instance, which a schedule may have wrapped
        finally:
            optimizer.state = state
            for group, members in groups:
                group["params"] = members
        return {number: (value, dict(states[value])) for number, value in made.items()}

    def _send_back(
        self, parameters: Sequence[nn.Parameter], owners: Sequence[int],
        made: Mapping[int, tuple[nn.Parameter, dict[str, Any]]],
    ) -> Iterator[_Staged]:  # fmt: skip
        """Give each shard its parts of the new values."""
        shards, shard = self._group.size(), self._group.rank()
        sent: list[list[Tensor]] = [[] for _ in range(shards)]
        words = {}
        for number, (value, state) in made.items():
            names = _divided(self._optimizer, value, state)
            words[number] = [
                [[name, str(state[name].dtype).removeprefix("torch.")] for name in names],
                {name: each for name, each in state.items() if name not in names},
            ]
            tensors: list[Tensor] = [value, *(state[name] for name in names)]
            for target in range(shards):
                sent[target] += [tensor.detach()[_block(parameters[number], target)] for tensor in tensors]
        told: dict[int, Any] = {}
        for word in self._group.share(codec.encode([*words.items()])):
            told.update((number, each) for number, each in codec.decode(word))
        expected: list[list[tuple[torch.Size, torch.dtype]]] = [[] for _ in range(shards)]
        for number, owner in enumerate(owners):
            size = _part(parameters[number], shard)
            kinds = [parameters[number].dtype, *(getattr(torch, dtype) for _, dtype in told[number][0])]
            expected[owner] += [(size, kind) for kind in kinds]
        received = [iter(parts) for parts in self._exchange(sent, expected)]
        for number, owner in enumerate(owners):
            names, scalars = told[number]
            part = next(received[owner])
            parts = {name: next(received[owner]) for name, _ in names}
            yield _Staged(parameters[number], part, parts, scalars)

    def _exchange(
        self, sent: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[tuple[torch.Size, torch.dtype]]]
    ) -> list[list[Tensor]]:
        """Send tensors to each shard, and return those of each shard, of these shapes and types."""
        device = local_shard(self._optimizer.param_groups[0]["params"][0]).device
        packed = [torch.cat([_bytes(each) for each in parts]) if parts else None for parts in sent]
        own = torch.cat(
            [torch.empty(0, dtype=torch.uint8, device=device), *(each for each in packed if each is not None)]
        )
        sizes = [0 if each is None else each.numel() for each in packed]
        coming = [sum(size.numel() * dtype.itemsize for size, dtype in parts) for parts in expected]
        arrived = torch.empty(sum(coming), dtype=torch.uint8, device=device)
        self._group.alltoall_base(arrived, own, coming, sizes, dist.AllToAllOptions()).wait()
        return [
            [*_unpacked(part, kinds)] for part, kinds in zip(arrived.split(coming), expected, strict=True)
        ]  # fmt: skip


def _divided(optimizer: Optimizer, parameter: Tensor, state: Mapping[str, Any]) -> list[str]:
    """Return the names of a state's tensors that have the shape of its parameter, in order.

    Raises:
        ConfigError: others are no scalars.
    """
    names = []
    for name, value in state.items():
        if isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape:
            names.append(name)
        elif not isinstance(value, int | float | str | type(None)) and not (
            isinstance(value, Tensor) and value.dim() == 0
        ):
            raise ConfigError(
                f"{type(optimizer).__name__} keeps {name!r} of another shape than the parameter's in its state, which "
                "cannot be divided among the shards; expected an optimizer such as torch.optim.Muon or AdamW"
            )
    return sorted(names)


def _dtypes(parameter: Tensor, state: Mapping[Any, Any], names: Sequence[str]) -> list[torch.dtype]:
    """Return the types of a parameter's gradient, its value, and the named tensors of its state."""
    assert parameter.grad is not None
    return [parameter.grad.dtype, parameter.dtype, *(state[parameter][name].dtype for name in names)]


def _copy(value: Any) -> Any:
    """Return a scalar of the state that the optimizer may change in place; tensors of a shape are replaced."""
    return value.clone() if isinstance(value, Tensor) and value.dim() == 0 else value


def _block(parameter: Tensor, shard: int) -> tuple[slice, ...]:
    """Return the place of a shard's part in a parameter."""
    assert isinstance(parameter, DTensor)
    return region(parameter, shard)


def _part(parameter: Tensor, shard: int) -> torch.Size:
    """Return the shape of a shard's part of a parameter."""
    return torch.Size([each.stop - each.start for each in _block(parameter, shard)])


def _sends(parameter: Tensor, shard: int) -> bool:
    """Whether a shard sends its part of a parameter to the owner, as the first one that holds it."""
    assert isinstance(parameter, DTensor)
    return holds_first(parameter, shard)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _unpacked(data: Tensor, kinds: Sequence[tuple[torch.Size, torch.dtype]]) -> Iterator[Tensor]:
    for part, (size, dtype) in zip(
        data.split([size.numel() * dtype.itemsize for size, dtype in kinds]), kinds, strict=True
    ):
        tensor = torch.empty(size, dtype=dtype, device=data.device)
        tensor.view(-1).view(torch.uint8).copy_(part)  # a view of `data` might not be aligned
        yield tensor
