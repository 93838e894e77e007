"""Checkpoints of a sharded model as folders in the format of `torch.distributed.checkpoint`: a file for each shard.

Each worker writes its own part and describes it (`checkpoints.parts`), and the first one writes the index. To read a
part needs no communication. Workers must share the file system.
"""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import metadata as stored
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from unicron_lightning.checkpoints import index, names
from unicron_lightning.checkpoints.names import MODEL
from unicron_lightning.checkpoints.parts import WrittenPart, write_objects, write_pieces
from unicron_lightning.checkpoints.staging import HeldCheckpoint, HeldTensor, saved_bytes
from unicron_lightning.checkpoints.storage import DATA_SUFFIX, FolderStorage
from unicron_lightning.errors import ConfigError
from unicron_lightning.fsdp.mesh import local_shard, with_local_shard
from unicron_lightning.fsdp.whole import load_optimizer
from unicron_lightning.worker.checkpoint_files import INDEX, REST
from unicron_lightning.worker.checkpoint_folders import FolderReader, PlainObjects

OPTIMIZER: Final = names.OPTIMIZER + "0"


def held_part(module: nn.Module, optimizer: Optimizer | None, shard: int, rest: Mapping[str, Any]) -> HeldCheckpoint:
    """Return this worker's shards, and on the first worker everything that is not divided."""
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner(_named(module, optimizer), is_coordinator=True)
    tensors, objects = [], {}
    for item in planner.create_local_plan().items:
        if item.type == WriteItemType.BYTE_IO:
            objects[item.index.fqn] = cast("io.BytesIO", planner.resolve_data(item)).getvalue()
        elif _is_own(item, shard):
            assert item.tensor_data is not None
            data, chunk = cast("Tensor", planner.resolve_data(item)).detach(), item.tensor_data.chunk
            tensors.append(HeldTensor(item.index.fqn, data, tuple(item.tensor_data.size), tuple(chunk.offsets)))
    held = {str(shard): tensors}
    return HeldCheckpoint(tensors=held, files={REST: rest}, objects=objects, places=planner.mappings)


def write_part(folder: FolderStorage, held: HeldCheckpoint, shard: int) -> bytes:
    """Write this worker's shards, and on the first worker the objects; return a description for `finish_folder`.

    Args:
        folder: begun, on storage that all workers see.
        held: by this worker, see `held_part`.
        shard: of this worker.
    """
    name = f"__{shard}_0{DATA_SUFFIX}"
    own = held.tensors[str(shard)]
    with folder.create(name) as file:
        pieces = write_pieces(file, name, ((each.staged(0), each.data.cpu().clone()) for each in own))
        pieces += write_objects(file, name, held.objects if shard == 0 else {})
    return msgspec.json.encode(WrittenPart(pieces, {name: file.digest}))


def finish_folder(folder: FolderStorage, parts: Sequence[bytes], held: HeldCheckpoint) -> dict[str, str]:
    """Write index and rest, and rename the folder, which then is complete.

    Args:
        folder: with all parts.
        parts: descriptions of all workers' parts, by shard.
        held: by this worker.

    Returns:
        Digests of all files, by name.
    """
    known = [msgspec.json.decode(part, type=WrittenPart) for part in parts]
    content = index.encode_index([piece for part in known for piece in part.pieces], held.places)
    files = {REST: saved_bytes(held.files[REST]), INDEX: content}
    folder.publish(files)
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    return {name: digest for each in (*(part.digests for part in known), digests) for name, digest in each.items()}


def load_module(folder: Path, module: nn.Module) -> None:
    """Read this worker's shards of the parameters and buffers, whatever number of shards has written them.

    Raises:
        ConfigError: the folder lacks a tensor, has one of another shape, or an index that names something else.
    """
    own = {name: tensor.detach() for name, tensor in module.state_dict(keep_vars=True).items()}
    entries = FolderReader(folder).read_metadata().state_dict_metadata
    for name, tensor in own.items():
        entry = entries.get(f"{MODEL}.{name}")
        found = getattr(entry, "size", None)
        if found != tensor.shape:
            has = "no tensor" if found is None else f"a tensor of shape {tuple(found)}"
            raise ConfigError(f"the checkpoint {folder} has {has} {name}; expected one of shape {tuple(tensor.shape)}")
    _read(folder, {MODEL: own})


def read_optimizer_part(folder: Path, module: nn.Module) -> dict[str, Any]:
    """Read this worker's shards of the optimizer's state, by names of parameters; nothing if the folder has none.

    The optimizer may not have its groups yet: `load_optimizer_part` gives them to it.
    """
    parameters = module.state_dict(keep_vars=True)
    known = FolderReader(folder).read_metadata()
    state: dict[str, Any] = {}
    for key, entry in known.state_dict_metadata.items():
        place = (known.planner_data or {}).get(key, ())
        if place[:1] == (OPTIMIZER,):
            about = parameters.get(place[2]) if place[1] == "state" else None
            set_element(state, place, _target(entry, about))
    if not state:
        return {}
    _read(folder, state)
    own: dict[str, Any] = state[OPTIMIZER]
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
    load_optimizer(optimizer, names.by_number(own, expected), whole=False)


def _named(module: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """The state of a module and its optimizer, by names, as torch's `get_optimizer_state_dict` gives it."""
    state: dict[str, Any] = {MODEL: {name: each.detach() for name, each in module.state_dict(keep_vars=True).items()}}
    if optimizer is not None:
        state[OPTIMIZER] = names.by_name(optimizer.state_dict(), _group_names(module, optimizer))
    return state


def _group_names(module: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """The name of each parameter of an optimizer, by group; the first one of a parameter with several."""
    names: dict[int, str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), name)
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def _is_own(item: WriteItem, shard: int) -> bool:
    """Whether this worker writes an entry: its shards with elements; the first worker also what is not divided."""
    if item.type != WriteItemType.SHARD:
        return shard == 0
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes.numel() > 0


def _target(entry: Any, parameter: Tensor | None) -> Any:
    """What an entry of the optimizer's state is read into: this worker's shard, a whole tensor, or another object."""
    if not isinstance(entry, stored.TensorStorageMetadata):
        return entry
    if isinstance(parameter, DTensor) and entry.size == parameter.shape and entry.size:
        return with_local_shard(parameter, torch.empty_like(local_shard(parameter), dtype=entry.properties.dtype))
    return torch.empty(entry.size, dtype=entry.properties.dtype)


def _read(folder: Path, state: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process.*")
        dcp.load(state, storage_reader=FolderReader(folder), planner=PlainObjects(), no_dist=True)
