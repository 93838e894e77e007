"""Checkpoints of a megatron-core model and its optimizer, loadable in another TP x PP x DP layout.

The format is megatron-core's own (`dist_checkpointing`, the distributed optimizer as "fully_reshardable"), which
Megatron's own tools read. Everything but tensors (Lightning's loops, callbacks, schedulers) is in ``common.pt``, read
with ``weights_only=True``: it must be plain data.

A rank describes, without communication, all that the first replica would write of its shard, so that any replica can
write it (`checkpoints.saving`). To load, it fills the same pieces. With the distributed optimizer a rank has ranges of
the flattened parameters' states, and may have copies of other ranks' ranges. A range becomes blocks of the parameter's
tensor: rows, and parts of the rows at its ends. Megatron's own functions gather whole tensors instead, and exchange
pickled plans. For megatron-core 0.16.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, merge, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factory_merges,
    is_main_replica,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

from unicron_lightning.checkpoints.index import StoredFolder
from unicron_lightning.checkpoints.pieces import HeldCheckpoint, HeldTensor, blocks, saved_bytes
from unicron_lightning.errors import ConfigError
from unicron_lightning.megatron.sharded import (
    FIELDS,
    ShardedOptimizer,
    columns,
    initialize_state,
    parameters_of,
    parts_of,
)
from unicron_lightning.replica.mirror import ROWS, Piece, Stored

_SHARDING: Final = "fully_reshardable"
"""Division of the distributed optimizer's state."""
_STATE: Final = "optimizer.state"
"""Prefix of the names of optimizer states."""
_MAIN_PARAMETER: Final = re.compile(r"(.*\.)?state\.param\.")
"""Names of the main parameters, which only a distributed optimizer stores with its state."""


def _content() -> dict[str, Any]:
    """Return the division of optimizer state, which is stored with it; Megatron adds groups of the present epoch."""
    return {"distrib_optim_sharding_type": _SHARDING, "chained_optim_avoid_prefix": True}


def held_checkpoint(
    ddps: Sequence[Any], optimizer: Any, rest: Mapping[str, Any], part: str, copies: Mapping[str, Stored] | None
) -> HeldCheckpoint:
    """Describe this rank's part of a checkpoint; its tensors are the training's own.

    Args:
        ddps: megatron-core's `DistributedDataParallel` of each part of the model on this rank.
        optimizer: megatron-core's.
        rest: further plain data, see `rest`.
        part: name of the part with this rank's shard.
        copies: with the distributed optimizer, the ranges of the optimizer's state that this rank has, by the names of
            their parts.

    Raises:
        ValueError: a tensor is not placed as those of Megatron's modules are.
    """
    model = _sharded(ddps)
    state: dict[str, Any] = {**model}
    ranges: dict[str, list[HeldTensor]] = {}
    if copies is None:
        state["optimizer"] = optimizer.sharded_state_dict(model, metadata=_content())
    else:
        placed, parameters = _placed(model, _is_of_first_lane), parameters_of(ddps)
        ranges = {
            name: [*_ranges(stored.holding.pieces, stored.data, parameters, placed)] for name, stored in copies.items()
        }
        parts = [{**part.state_dict(), "param_state_sharding_type": _SHARDING} for part in parts_of(optimizer)]
        state["optimizer"] = parts[0] if len(parts) == 1 else dict(enumerate(parts))
    state |= {"rest": rest, "content_metadata": _content()}
    placed_part, common = save_preprocess(state, validate_access_integrity=False)
    shard = [_held(each) for each in nested_values(placed_part) if _is_of_first_replica(each)]
    config = json.dumps(asdict(CheckpointingConfig("torch_dist", 1))).encode()
    files = {COMMON_STATE_FNAME: saved_bytes(common), CONFIG_FNAME: config}
    return HeldCheckpoint(tensors={part: shard, **ranges}, files=files)


def load_folder(path: str | Path, ddps: Sequence[Any], optimizer: Any) -> None:
    """Load this rank's part of model and optimizer from a checkpoint of any layout.

    Raises:
        ConfigError: no checkpoint exists at ``path``, its index names something that no index needs, or it was written
            with a distributed optimizer and is to be loaded without, or the reverse.
    """
    _check(path)
    stored, parts = StoredFolder(path), parts_of(optimizer)
    _check_kind(str(path), stored.entries, parts)
    for part in parts:
        initialize_state(part)
    model = _sharded(ddps)
    state: dict[str, Any] = {**model}
    ranges: list[HeldTensor] = []
    shard = ShardedOptimizer(ddps, optimizer) if _are_distributed(parts) else None
    if shard is None:
        state["optimizer"] = optimizer.sharded_state_dict(model, is_loading=True, metadata=_content())
    else:
        values = torch.zeros(ROWS, sum(map(len, shard.pieces)))
        ranges += _ranges(shard.pieces, values, parameters_of(ddps), _placed(model, lambda _: True))
    loaded = _read(stored, path, state, ranges, parts)
    for ddp, name in zip(ddps, model, strict=True):
        ddp.module.load_state_dict(loaded[name])
    for part in [loaded["optimizer"]] if len(parts) == 1 else loaded["optimizer"].values():
        part.pop("param_state", None)
    optimizer.load_state_dict(loaded["optimizer"])
    for part in parts:
        _own_steps(part)
    if shard is not None:
        shard.write(values, shard.counts)


def _sharded(ddps: Sequence[Any]) -> dict[str, Any]:
    """Describe the model's tensors by Megatron's names of its parts. Names of tensors do not depend on the parts."""
    names = ["model"] if len(ddps) == 1 else [f"model{number}" for number in range(len(ddps))]
    return {name: ddp.module.sharded_state_dict(metadata=_content()) for name, ddp in zip(names, ddps, strict=True)}


def _read(
    stored: StoredFolder,
    path: str | Path,
    state: dict[str, Any],
    ranges: Sequence[HeldTensor],
    parts: Sequence[Any],
) -> dict[str, Any]:
    """Return a state with the stored values, as megatron-core's ``load`` does, without its exchanges."""
    wanted, others, factories = load_preprocess(state)
    wanted, _ = extract_sharded_base(wanted)
    placed = [*nested_values(wanted)]
    tensors = [each for each in placed if isinstance(each, ShardedTensor)]
    padded = [each for each in tensors if each.allow_shape_mismatch]
    for each in padded:
        each.data.detach().zero_()  # rows of the padding may not be stored
    names = [each.unique_key for each in placed if isinstance(each, ShardedObject)]
    resized = tuple(each.key for each in padded)
    objects = stored.fill([*map(_held, tensors), *ranges], resized=resized, objects=names)

    def value(each: ShardedTensor | ShardedObject) -> Any:
        return each.data if isinstance(each, ShardedTensor) else objects[each.unique_key][0]

    common: Any = dist_checkpointing.load_common_state_dict(str(path))
    common["optimizer"] = _of_parts(str(path), common["optimizer"], parts)
    found: dict[str, Any] = merge(merge(common, others), dict_list_map_outplace(value, wanted))
    return apply_factory_merges(found, factories)  # type: ignore[no-any-return]


def _of_parts(path: str, stored: dict[Any, Any], parts: Sequence[Any]) -> dict[Any, Any]:
    """Return the optimizer's plain data in the form of this run's, whose experts may be divided otherwise.

    Megatron has an optimizer of their own for experts that several workers divide, with groups of parameters that
    differ from the others' only in that.

    Raises:
        ConfigError: a group of this run's parameters has no equal in the checkpoint.
    """
    known = _stored_groups(stored)
    found = {}
    for number, part in enumerate(parts):
        source = copy.deepcopy(_part_of(stored, number))  # Megatron adds each part's tensors in place
        groups = [dict(known[place]) for place in _places(path, known, part.optimizer.param_groups)]
        for group, own in zip(groups, part.optimizer.param_groups, strict=True):
            group["is_expert_parallel"] = own["is_expert_parallel"]
        if "optimizer" in source:
            found[number] = {**source, "optimizer": {**source["optimizer"], "param_groups": groups}}
        else:
            found[number] = {**source, "param_groups": groups}
    return found[0] if len(parts) == 1 else found


def places_of_groups(path: str | Path, optimizer: Any) -> tuple[list[int], int]:
    """Return the number of each of an optimizer's groups of parameters in a checkpoint, and how many it has there.

    Raises:
        ConfigError: a group has no equal in the checkpoint.
    """
    common: Any = dist_checkpointing.load_common_state_dict(str(path))
    known = _stored_groups(common["optimizer"])
    wanted = [group for part in parts_of(optimizer) for group in part.optimizer.param_groups]
    return _places(str(path), known, wanted), len(known)


def _part_of(stored: dict[Any, Any], number: int) -> dict[str, Any]:
    """The plain data of one optimizer of a chain, or of the only one."""
    part: dict[str, Any] = stored[min(number, len(stored) - 1)] if 0 in stored else stored
    return part


def _stored_groups(stored: dict[Any, Any]) -> list[dict[str, Any]]:
    """The groups of parameters in a checkpoint, of all its optimizers."""
    parts = [_part_of(stored, number) for number in range(len(stored) if 0 in stored else 1)]
    return [group for part in parts for group in part.get("optimizer", part)["param_groups"]]


def _places(path: str, stored: Sequence[Mapping[str, Any]], wanted: Sequence[Mapping[str, Any]]) -> list[int]:
    """Find the equals of groups: of the same rates, and if possible for experts or for other parameters as they are."""
    keys = [[group[f"pre_{name}" if name not in group else name] for name in _RATES] for group in stored]
    places = []
    for group in wanted:
        key = [group[f"pre_{name}" if name not in group else name] for name in _RATES]
        equal = [place for place, other in enumerate(keys) if other == key]
        of_kind = [place for place in equal if stored[place]["is_expert_parallel"] == group["is_expert_parallel"]]
        if not equal:
            raise ConfigError(
                f"{path!r} has no parameters with {', '.join(map('{}={!r}'.format, _RATES, key))}: expected the "
                "OptimizerConfig with which it was written"
            )
        places.append((of_kind or equal)[0])
    return places


_RATES: Final = ("wd_mult", "lr_mult", "is_decoupled_lr")
"""Fields by which Megatron divides parameters into groups, beside that of experts."""


def rest(path: str | Path) -> dict[str, Any]:
    """The part of a checkpoint that is not model or optimizer. Not a collective.

    Raises:
        ConfigError: no checkpoint exists at ``path``.
    """
    _check(path)
    found: dict[str, Any] = dist_checkpointing.load_common_state_dict(str(path))["rest"]
    return found


def _check(path: str | Path) -> None:
    if not dist_checkpointing.check_is_distributed_checkpoint(str(path)):
        raise ConfigError(f"{str(path)!r} is no checkpoint of megatron-core: expected a folder with metadata.json")


def _check_kind(path: str, stored: Iterable[str], parts: Sequence[Any]) -> None:
    """Refuse the state of another kind of optimizer, whose tensors have other names."""
    was, now = any(_MAIN_PARAMETER.match(name) for name in stored), _are_distributed(parts)
    if was != now:
        raise ConfigError(
            f"{path!r} was written with use_distributed_optimizer={was}, and this run has "
            f"use_distributed_optimizer={now}: expected the same value in OptimizerConfig and in Megatron's ddp"
        )


def _are_distributed(parts: Sequence[Any]) -> bool:
    """Whether optimizers are Megatron's distributed one."""
    return any(isinstance(part, DistributedOptimizer) for part in parts)


def _own_steps(part: Any) -> None:
    """Give each parameter's step count its own tensor, since loading assigns one shared tensor, which each would
    advance.

    The count in the parameter groups is removed: torch's Adam would not advance it, and it would be read later.
    """
    if isinstance(part.optimizer, torch.optim.Adam):
        for state in part.optimizer.state.values():
            state["step"] = torch.as_tensor(state["step"]).clone()
        for group in part.optimizer.param_groups:
            group.pop("step", None)


def _held(each: ShardedTensor | ShardedObject) -> HeldTensor:
    """Describe an entry as torch's format has it: axes that Megatron prepends are axes of size 1."""
    if isinstance(each, ShardedObject):
        data = torch.frombuffer(bytearray(saved_bytes([each.data])), dtype=torch.uint8)
        return HeldTensor(each.unique_key, data, is_object=True)
    data = each.data.detach().view((1,) * each.prepend_axis_num + tuple(each.local_shape))
    return HeldTensor(each.key, data, tuple(each.global_shape), tuple(each.global_offset))


def _is_of_first_replica(each: ShardedTensor | ShardedObject) -> bool:
    """Whether the first data-parallel replica would write an entry, given the entry of any replica.

    Raises:
        ValueError: the entry's id does not end with the number of the replica.
    """
    own, found = parallel_state.get_data_parallel_rank(with_context_parallel=True), each.replica_id
    of_experts = parallel_state.get_expert_data_parallel_rank()
    if not isinstance(found, tuple) or found[-1] not in (own, of_experts):
        raise ValueError(
            f"{each.key} has replica_id={found!r}: expected a tuple that ends with the data-parallel rank {own}, or "
            f"with that of experts, {of_experts}"
        )
    # With experts the two ranks are equal only in the first column of the first replica; otherwise always.
    equal = columns() // parallel_state.get_expert_model_parallel_world_size()  # columns with the same experts
    first = own % columns() == 0 if found[-1] == own else of_experts % equal == 0
    return _is_of_first_lane(each) and first


def _is_of_first_lane(each: ShardedTensor) -> bool:
    """Whether the first lane of the first replica would write an entry that all lanes have, or the own lane's."""
    return bool(is_main_replica((*each.replica_id[:-1], 0)))


# ---- ranges of the distributed optimizer


@dataclass(frozen=True)
class _PlacedChunk:
    """A part of a parameter that is a tensor of the checkpoint, or a chunk of one.

    Attributes:
        start: number of its first element in the flattened parameter.
        chunk: as Megatron describes it.
    """

    start: int
    chunk: ShardedTensor


def _placed(
    model: Mapping[str, Any], chosen: Callable[[ShardedTensor], bool]
) -> dict[nn.Parameter, list[_PlacedChunk]]:
    """Return the chosen places of each parameter.

    Raises:
        ValueError: a part of a parameter is not a view of adjacent elements.
    """
    found: dict[nn.Parameter, list[_PlacedChunk]] = {}
    for each in nested_values(model):
        if isinstance(each, ShardedObject):
            continue
        chunks: Iterable[ShardedTensor] = [each]
        if isinstance(each, ShardedTensorFactory):
            chunks = nested_values(each.build())
        found[each.data] = [_PlacedChunk(_start(chunk, each.data), chunk) for chunk in chunks if chosen(chunk)]
    return found


def _start(chunk: ShardedTensor, parameter: Tensor) -> int:
    data: Any = chunk.data
    if not data.is_contiguous() or data.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
        raise ValueError(f"{chunk.key}: expected a view of adjacent elements of the parameter")
    return int(data.storage_offset() - parameter.storage_offset())


def _ranges(
    pieces: Sequence[Piece],
    data: Tensor,
    parameters: Sequence[nn.Parameter],
    placed: Mapping[nn.Parameter, Sequence[_PlacedChunk]],
) -> Iterator[HeldTensor]:
    """Describe ranges of the optimizer's state, with their values [3, elements]."""
    position = 0
    for piece in pieces:
        for place in placed[parameters[piece.parameter % len(parameters)]]:
            end = place.start + place.chunk.data.numel()
            first, last = max(piece.start, place.start), min(piece.stop, end)
            if first < last:
                values = data[:, position + first - piece.start : position + last - piece.start]
                yield from _blocks(place.chunk, values, first - place.start, last - place.start)
        position += len(piece)


def _blocks(chunk: ShardedTensor, data: Tensor, first: int, last: int) -> Iterator[HeldTensor]:
    """Describe a range of a chunk's elements.

    Args:
        chunk: the parameter's.
        data: its values, [3, elements].
        first: first element of the range.
        last: first element after it.
    """
    prepended, position = chunk.prepend_axis_num, 0
    for offsets, sizes in blocks(chunk.local_shape, first, last):
        within = (0,) * prepended + offsets
        place = tuple(whole + own for whole, own in zip(chunk.global_offset, within, strict=True))
        elements = torch.Size(sizes).numel()
        for row, field in enumerate(FIELDS):
            values = data[row, position : position + elements].view((1,) * prepended + sizes)
            yield HeldTensor(f"{_STATE}.{field}.{chunk.key}", values, tuple(chunk.global_shape), place)
        position += elements
