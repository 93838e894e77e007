"""A rank's part of a checkpoint in Megatron's format, described without communication.

Each rank describes all that the first replica would write of its shard, so that any replica can write it. With the
distributed optimizer a rank has ranges of the flattened parameters' states, and may have copies of other ranks' ranges.
A range becomes blocks of the parameter's tensor: rows, and parts of the rows at its ends. The names, shapes and places
are those of `checkpoint.save`, which gathers whole tensors instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch import Tensor, nn

from unicron_lightning.checkpoints.division import blocks
from unicron_lightning.checkpoints.staging import HeldCheckpoint, HeldTensor, saved_bytes
from unicron_lightning.megatron import checkpoint
from unicron_lightning.megatron.sharded import FIELDS
from unicron_lightning.replica.mirror import Stored

_STATE: Final = "optimizer.state"
"""Prefix of the names of optimizer states."""


def held_checkpoint(
    ddp: Any, optimizer: Any, rest: Mapping[str, Any], part: str, copies: Mapping[str, Stored] | None
) -> HeldCheckpoint:
    """Describe this rank's part of a checkpoint; its tensors are the training's own.

    Args:
        ddp: megatron-core's `DistributedDataParallel` module.
        optimizer: megatron-core's.
        rest: as of `checkpoint.save`.
        part: name of the part with this rank's shard.
        copies: with the distributed optimizer, the ranges of the optimizer's state that this rank has, by the names of
            their parts.

    Raises:
        ValueError: a tensor is not placed as those of Megatron's modules are.
    """
    if copies is None:
        content = checkpoint.sharded([ddp], optimizer, is_loading=False)
        ranges: dict[str, list[HeldTensor]] = {}
    else:
        content = {"model": ddp.module.sharded_state_dict(metadata=checkpoint.content())}
        placed = _placed(content["model"])
        parameters = [*ddp.module.parameters()]
        ranges = {name: [*_ranges(stored, parameters, placed)] for name, stored in copies.items()}
        content["optimizer"] = checkpoint.without_ranges(optimizer)
    content |= {"rest": rest, "content_metadata": checkpoint.content()}
    placed_part, common = save_preprocess(content, validate_access_integrity=False)
    shard = [_held(each) for each in nested_values(placed_part) if _is_of_first_replica(each)]
    config = json.dumps(asdict(CheckpointingConfig("torch_dist", 1))).encode()
    return HeldCheckpoint(tensors={part: shard, **ranges}, files={COMMON_STATE_FNAME: common, CONFIG_FNAME: config})


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
    if not isinstance(found, tuple) or found[-1] != own:
        raise ValueError(
            f"{each.key} has replica_id={found!r}: expected a tuple that ends with the data-parallel rank {own}"
        )
    return bool(is_main_replica((*found[:-1], 0)))


# ---- ranges of the distributed optimizer


@dataclass(frozen=True)
class _Place:
    """A part of a parameter that is a tensor of the checkpoint, or a chunk of one.

    Attributes:
        start: number of its first element in the flattened parameter.
        chunk: as Megatron describes it.
    """

    start: int
    chunk: ShardedTensor


def _placed(model: Mapping[str, Any]) -> dict[nn.Parameter, list[_Place]]:
    """Return the places of each parameter that this shard's first replica writes.

    Raises:
        ValueError: a part of a parameter is not a view of adjacent elements.
    """
    found: dict[nn.Parameter, list[_Place]] = {}
    for each in nested_values(model):
        if isinstance(each, ShardedObject):
            continue
        chunks: Iterable[ShardedTensor] = [each]
        if isinstance(each, ShardedTensorFactory):
            chunks = nested_values(each.build())
        found[each.data] = [_Place(_start(chunk, each.data), chunk) for chunk in chunks if _is_of_first_replica(chunk)]
    return found


def _start(chunk: ShardedTensor, parameter: Tensor) -> int:
    data: Any = chunk.data
    if not data.is_contiguous() or data.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
        raise ValueError(f"{chunk.key}: expected a view of adjacent elements of the parameter")
    return int(data.storage_offset() - parameter.storage_offset())


def _ranges(
    stored: Stored, parameters: Sequence[nn.Parameter], placed: Mapping[nn.Parameter, Sequence[_Place]]
) -> Iterator[HeldTensor]:
    """Describe the ranges of a copy."""
    position = 0
    for piece in stored.holding.pieces:
        for place in placed[parameters[piece.parameter]]:
            end = place.start + place.chunk.data.numel()
            first, last = max(piece.start, place.start), min(piece.stop, end)
            if first < last:
                data = stored.data[:, position + first - piece.start : position + last - piece.start]
                yield from _blocks(place.chunk, data, first - place.start, last - place.start)
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
