"""Updates that need whole matrices, such as those of Muon, Shampoo and SOAP, of a model whose workers hold shards.

Each matrix has an owner among the shards of a replica. Before the commit of a step the owners receive the shards of
gradients, parameters and states of their matrices, run the script's optimizer on whole tensors, and send each shard its
part of the new values. These are *staged*: parameters and states stay as they are until the step is committed, so a
worker that returns from a failed update has lost nothing, and the update is computed again. After the commit the staged
values are copied, without communication.

The owners compute what one process computes, so the result does not depend on the number of shards. States stay
divided: as the parameters, or, if their tensors have another shape, by rows among the lanes. So checkpoints, joiners
and other numbers of shards need nothing else.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Muon, Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from unicron_lightning.errors import ConfigError
from unicron_lightning.fsdp.folder import has_elements, state_shard
from unicron_lightning.fsdp.mesh import ShardGroup, holds_first, local_shard, region, with_local_shard
from unicron_lightning.worker import codec

ROUND_BYTES: Final = 1 << 26
"""Size of the matrices that an owner updates at a time."""


def needs_whole(optimizer: Optimizer) -> bool:
    """Whether an optimizer's update needs whole parameters.

    These are Muon, classes with that in their names, such as one that updates other parameters by AdamW, and those that
    have the attribute ``needs_whole_parameters``, of the class or of the object.
    """
    named = any("muon" in each.__name__.lower() for each in type(optimizer).__mro__)
    return bool(getattr(optimizer, "needs_whole_parameters", isinstance(optimizer, Muon) or named))


@dataclass(frozen=True)
class _Staged:
    """New values of this worker's shard of a parameter.

    Attributes:
        parameter: as the optimizer has it.
        value: this worker's part.
        state: its state, divided.
    """

    parameter: nn.Parameter
    value: Tensor
    state: Mapping[str, Any]


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
        self._settings: list[dict[str, Any] | None] = []
        """What the update changes in the optimizer's groups, such as a number of steps; None: it is not known yet."""
        self._before: list[dict[str, Any]] = []
        """Settings of the groups with which the update was computed."""
        self._handed: list[Tensor] = []
        """Parts of gradients that the script gets after the update."""
        self._norms: Sequence[Tensor] = []
        """Of these, which must not change; operations on FSDP2's tensors do not count as versions."""
        for parameter, state in optimizer.state.items():  # of its constructor, which may have made whole tensors
            state.update(tree_map(partial(_shard_of, parameter), dict(state)))

    @torch.no_grad()
    def stage(self) -> None:
        """Compute the update; a collective of the replica.

        Raises:
            ConfigError: the optimizer's state is no plain data, or its settings depend on all parameters.
            RuntimeError: the connections are closed.
        """
        self.discard()
        self._settings = [None for _ in self._optimizer.param_groups]
        self._before = [copy.deepcopy(_settings_of(group)) for group in self._optimizer.param_groups]
        for parameters, owners in self._rounds():
            self._staged += self._update(parameters, owners)

    @torch.no_grad()
    def apply(self) -> None:
        """Take the staged values, after the commit."""
        for each in self._staged:
            local_shard(each.parameter).copy_(each.value)
            own = self._optimizer.state[each.parameter]
            own.clear()
            own.update(each.state)
        for group, changed in zip(self._optimizer.param_groups, self._settings, strict=False):  # a spare has none
            group.update(changed or {})
        self.discard()

    def discard(self) -> None:
        """Drop the staged values: the state of another worker is loaded."""
        self._staged, self._settings, self._before = [], [], []

    def step_by(self, optimizer: Optimizer, taken: Callable[[], None]) -> None:
        """Let the optimizer's own ``step`` run its closure and take the new values; ``taken`` is called then."""

        def step(closure: Callable[[], Any] | None = None) -> Any:
            output = None if closure is None else closure()
            self.check_unchanged()
            taken()
            optimizer._opt_called = True  # type: ignore[attr-defined]
            return output

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # of a schedule, which has seen its own
        optimizer.step = step  # type: ignore[method-assign]

    def hand(self) -> None:
        """Remember the gradients that the script gets."""
        self._handed = self._gradients()
        self._norms = torch._foreach_norm(self._handed) if self._handed else []

    def check_unchanged(self) -> None:
        """Refuse a script that has changed gradients or settings since the update was computed, before the commit.

        Raises:
            ConfigError: a gradient or a setting is another one.
        """
        if not self._handed:
            return  # no update
        now, handed, name = self._gradients(), self._handed, type(self._optimizer).__name__
        self._handed = []
        pairs = zip(torch._foreach_norm(now) if now else [], self._norms, strict=len(now) == len(handed))
        equal = all(torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True) for one, other in pairs)
        if len(now) != len(handed) or not equal:
            raise ConfigError(
                f"a hook, or the script, has changed gradients, from which {name} has computed its update before the "
                "commit of the step; expected Trainer(gradient_clip_val=...), step.run(..., max_norm=...), or a change "
                "of the loss"
            )
        groups = [_settings_of(group) for group in self._optimizer.param_groups]
        changed = [_changed(before, after) for before, after in zip(self._before, groups, strict=False)]
        if any(changed):
            raise ConfigError(
                f"a hook, or the script, has changed the settings {changed} of {name} after its update was computed, "
                "before the commit of the step; expected a change before the step, or after the optimizer's step"
            )

    def _gradients(self) -> list[Tensor]:
        members = (each for group in self._optimizer.param_groups for each in group["params"])
        return [local_shard(each.grad) for each in members if each.grad is not None]

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
        sent: list[list[Tensor]] = [[] for _ in range(shards)]
        for each, owner in zip(parameters, owners, strict=True):
            assert each.grad is not None
            parts: list[tuple[Tensor, Tensor]] = [(each, self.prepared(local_shard(each.grad)))]
            parts += [(tensor, local_shard(tensor)) for tensor in (each, *self._tensors(each))]
            sent[owner] += [part for tensor, part in parts if _sends(tensor, shard)]  # others of the lane have the same
        own = [number for number, owner in enumerate(owners) if owner == shard]
        kinds = [kind for number in own for kind in self._kinds(parameters[number])]
        expected = [
            [(_part(tensor, source), dtype) for tensor, dtype in kinds if _sends(tensor, source)]
            for source in range(shards)
        ]  # fmt: skip
        received = [iter(parts) for parts in self._exchange(sent, expected)]
        whole = []
        for tensor, dtype in kinds:
            made = torch.empty(tensor.shape, dtype=dtype, device=local_shard(tensor).device)
            for source in range(shards):
                if _sends(tensor, source):
                    made[_block(tensor, source)] = next(received[source])
            whole.append(made)
        return self._send_back(parameters, owners, *self._step(parameters, own, iter(whole)))

    def _tensors(self, parameter: Tensor) -> list[Tensor]:
        """Return the tensors of a parameter's state that are divided."""
        return [each for each in tree_leaves(dict(self._optimizer.state.get(parameter, {}))) if has_elements(each)]

    def _kinds(self, parameter: Tensor) -> list[tuple[Tensor, torch.dtype]]:
        """Return what an owner receives: gradient, value and state, each as a tensor of that division, and its type."""
        assert parameter.grad is not None
        state = [(each, each.dtype) for each in self._tensors(parameter)]
        return [(parameter, parameter.grad.dtype), (parameter, parameter.dtype), *state]

    def _step(
        self, parameters: Sequence[nn.Parameter], own: Sequence[int], whole: Iterator[Tensor]
    ) -> tuple[dict[int, tuple[nn.Parameter, dict[str, Any]]], list[dict[str, Any] | None]]:
        """Run the optimizer on whole tensors.

        Returns:
            The new values with their states, by number of the parameter, and what has changed in each group; None for a
            group without parameters that has not changed.
        """
        optimizer, state = self._optimizer, self._optimizer.state
        made: dict[int, nn.Parameter] = {}
        states: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        for number in own:
            gradient, value = next(whole), nn.Parameter(next(whole))
            value.grad, made[number] = gradient, value
            states[value] = tree_map(
                lambda each: next(whole) if has_elements(each) else copy.deepcopy(each),
                dict(state.get(parameters[number], {})),
            )
        numbers = {id(each): number for number, each in enumerate(parameters)}
        groups = [(group, {**group}) for group in optimizer.param_groups]
        try:
            optimizer.state = states
            for group, kept in groups:
                group.update(copy.deepcopy(_settings_of(kept)))
                group["params"] = [made[numbers[id(each)]] for each in kept["params"] if numbers.get(id(each)) in made]
            type(optimizer).step(optimizer)  # not that of the instance, which a schedule may have wrapped
            changes = [(_changed(kept, _settings_of(group)), group["params"]) for group, kept in groups]
        finally:
            optimizer.state = state
            for group, kept in groups:
                group.clear()
                group.update(kept)
        settings = [changed if changed or updated else None for changed, updated in changes]
        return {number: (value, dict(states[value])) for number, value in made.items()}, settings

    def _send_back(
        self, parameters: Sequence[nn.Parameter], owners: Sequence[int],
        made: Mapping[int, tuple[nn.Parameter, dict[str, Any]]], settings: Sequence[Mapping[str, Any] | None],
    ) -> Iterator[_Staged]:  # fmt: skip
        """Give each shard its parts of the new values."""
        shards, shard = self._group.size(), self._group.rank()
        sent: list[list[Tensor]] = [[] for _ in range(shards)]
        words = {}
        for number, (value, state) in made.items():
            words[number] = tree_map(_described, state)
            tensors = [value.detach(), *(each for each in tree_leaves(state) if has_elements(each))]
            for target in range(shards):
                sent[target] += [each[_block(_like(parameters[number], each.shape), target)] for each in tensors]
        told: dict[int, Any] = {}
        for word in self._group.share(self._encoded([[*words.items()], settings])):
            found, changed = codec.decode(word)
            told.update(found)
            self._settings = [*map(self._agreed, self._settings, changed)]
        expected: list[list[tuple[torch.Size, torch.dtype]]] = [[] for _ in range(shards)]
        for number, owner in enumerate(owners):
            parameter = parameters[number]
            expected[owner].append((_part(parameter, shard), parameter.dtype))
            for each in filter(_is_description, tree_leaves(told[number], is_leaf=_is_description)):
                expected[owner].append((_part(_like(parameter, each[_SHAPE]), shard), each[_DTYPE]))
        received = [iter(parts) for parts in self._exchange(sent, expected)]

        def taken(whole: Tensor, parts: Iterator[Tensor], each: Any) -> Any:
            return with_local_shard(whole, next(parts), each[_SHAPE]) if _is_description(each) else each

        for number, owner in enumerate(owners):
            part, take = next(received[owner]), partial(taken, parameters[number], received[owner])
            yield _Staged(parameters[number], part, tree_map(take, told[number], is_leaf=_is_description))

    def _agreed(self, known: dict[str, Any] | None, new: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return what owners of a group's parameters, or updates one after the other, have changed in its settings."""
        if known is None or new is None:
            return known if new is None else new
        if different := sorted(_changed(known, new).keys() | _changed(new, known).keys()):
            raise ConfigError(
                f"{type(self._optimizer).__qualname__} changes the settings {different} of a group differently for "
                "different parameters, as if it computed them from all parameters together; expected an optimizer that "
                "updates each parameter by itself"
            )
        return known

    def _encoded(self, words: Any) -> bytes:
        try:
            return codec.encode(words)
        except codec.NotPlainData as error:
            name = type(self._optimizer).__qualname__
            raise ConfigError(f"the state of the optimizer {name} cannot be divided among shards: {error}") from error

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


_SHAPE, _DTYPE = "unicron_shape", "unicron_dtype"
"""Keys of what describes a tensor of a state to the other shards."""


def _described(value: Any) -> Any:
    return {_SHAPE: [*value.shape], _DTYPE: value.dtype} if has_elements(value) else value


def _is_description(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {_SHAPE, _DTYPE}


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that an update has changed; a hook may change others before they are taken."""

    def equal(one: Any, other: Any) -> bool:
        return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)

    return {name: each for name, each in after.items() if name not in before or not equal(each, before[name])}


def _shard_of(parameter: Tensor, value: Any) -> Any:
    """Return this worker's shard of a tensor of a parameter's state."""
    return state_shard(parameter, value) if has_elements(value) and not isinstance(value, DTensor) else value


def _like(parameter: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor that is divided as one of this shape of a parameter's state."""
    return (
        with_local_shard(parameter, torch.empty(0, dtype=parameter.dtype), shape)
        if isinstance(parameter, DTensor)
        else torch.empty(shape, device="meta")
    )


def _block(tensor: Tensor, shard: int) -> tuple[slice, ...]:
    """Return the place of a shard's part in a tensor."""
    return region(tensor, shard) if isinstance(tensor, DTensor) else tuple(slice(0, size) for size in tensor.shape)


def _part(tensor: Tensor, shard: int) -> torch.Size:
    """Return the shape of a shard's part of a tensor."""
    return torch.Size([each.stop - each.start for each in _block(tensor, shard)])


def _sends(tensor: Tensor, shard: int) -> bool:
    """Whether a shard sends its part of a tensor to the owner, as the first one that holds it."""
    return holds_first(tensor, shard) if isinstance(tensor, DTensor) else shard == 0


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _unpacked(data: Tensor, kinds: Sequence[tuple[torch.Size, torch.dtype]]) -> Iterator[Tensor]:
    for part, (size, dtype) in zip(
        data.split([size.numel() * dtype.itemsize for size, dtype in kinds]), kinds, strict=True
    ):
        tensor = torch.empty(size, dtype=dtype, device=data.device)
        tensor.view(-1).view(torch.uint8).copy_(part)  # a view of `data` might not be aligned
        yield tensor
