"""Checkpoints of a sharded model as folders in the format of `torch.distributed.checkpoint`: a file for each shard.

Each worker plans its own part and describes it, and the first one writes the index (`checkpoints.index`). To read a
part needs no communication. Workers must share the file system.
"""

from __future__ import annotations

import dataclasses
import io
import shutil
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
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from unicron_lightning.checkpoints import index, names
from unicron_lightning.checkpoints.names import MODEL, REST
from unicron_lightning.checkpoints.parts import IndexEntry, WrittenPart
from unicron_lightning.checkpoints.staging import HeldCheckpoint, HeldTensor
from unicron_lightning.errors import ConfigError
from unicron_lightning.fsdp.mesh import local_shard
from unicron_lightning.fsdp.whole import like, load_optimizer
from unicron_lightning.worker.checkpoint_files import INDEX
from unicron_lightning.worker.checkpoint_folders import FolderReader, HashingFiles, PlainObjects

OPTIMIZER: Final = names.OPTIMIZER + "0"


def begin_folder(folder: Path) -> None:
    """Make an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def write_part(folder: Path, module: nn.Module, optimizer: Optimizer | None, shard: int) -> bytes:
    """Write this worker's shards, and on the first worker everything that is not divided.

    Args:
        folder: made by `begin_folder`, on storage that all workers see.
        module: sharded.
        optimizer: of its parameters; None: not part of the checkpoint.
        shard: of this worker.

    Returns:
        A description for `finish_folder`.
    """
    files, writer = HashingFiles(), dcp.FileSystemWriter(folder)
    writer.fs = files
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner(_named(module, optimizer), is_coordinator=shard == 0)
    plan = planner.create_local_plan()
    items = {item.index: item for item in plan.items if _is_own(item, shard)}
    before = [SavePlan([]) for _ in range(shard)]  # plans are numbered, and files named by these numbers
    plan = writer.prepare_global_plan([*before, dataclasses.replace(plan, items=list(items.values()))])[shard]
    results = writer.write_data(plan, planner).wait()
    pieces = [_piece(items[result.index], result) for result in results]
    return msgspec.json.encode(WrittenPart(pieces, files.digests))


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


def finish_folder(
    folder: Path, target: Path, parts: Sequence[bytes], places: Mapping[str, Any], rest: Any
) -> dict[str, str]:
    """Write index and rest, and rename the folder, which then is complete.

    Args:
        folder: with all parts.
        target: its path, where it replaces another checkpoint.
        parts: descriptions of all workers' parts, by shard.
        places: see `places_of`.
        rest: of Lightning's checkpoint.

    Returns:
        Digests of all files, by name.
    """
    known = [msgspec.json.decode(part, type=WrittenPart) for part in parts]
    files = HashingFiles()
    pieces = [piece for part in known for piece in part.pieces]
    with files.create_stream(folder / INDEX, "wb") as file:
        file.write(index.encode_index(pieces, places))
    with files.create_stream(folder / REST, "wb") as file:
        torch.save(rest, file)
    _move(folder, target)
    return {
        name: digest
        for digests in (*(part.digests for part in known), files.digests)
        for name, digest in digests.items()
    }


def places_of(module: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """Return the path of each entry of the index in the nested state."""
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner(_named(module, optimizer))
    return planner.mappings


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
    names, groups = _group_names(module, optimizer), own["param_groups"]
    if [sorted(group["params"]) for group in groups] != [sorted(group) for group in names]:
        raise ConfigError(
            "the checkpoint has other groups of the optimizer's parameters than the module: "
            f"{[group['params'] for group in groups]}, expected {names}"
        )
    numbers = {name: number for number, name in enumerate(_flat(names))}
    entries = {
        numbers[name]: {
            key: local_shard(value) if isinstance(value, Tensor) else value for key, value in values.items()
        }
        for name, values in own.get("state", {}).items()
    }
    restored = [{**group, "params": [numbers[name] for name in own]} for group, own in zip(groups, names, strict=True)]
    load_optimizer(optimizer, {"state": entries, "param_groups": restored}, whole=False)


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


def _flat(names: Sequence[Sequence[str]]) -> list[str]:
    return [name for group in names for name in group]


def _is_own(item: WriteItem, shard: int) -> bool:
    """Whether this worker writes an entry: its shards with elements; the first worker also what is not divided."""
    if item.type != WriteItemType.SHARD:
        return shard == 0
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes.numel() > 0


def _piece(item: WriteItem, result: WriteResult) -> IndexEntry:
    data, at = item.tensor_data, result.storage_data
    place = {"name": item.index.fqn, "file": at.relative_path, "start": at.offset, "length": at.length}
    if data is None:
        return IndexEntry(**place)
    dtype = str(data.properties.dtype).removeprefix("torch.")
    return IndexEntry(
        **place,
        dtype=dtype,
        whole=tuple(data.size),
        offsets=tuple(data.chunk.offsets),
        sizes=tuple(data.chunk.sizes),
    )


def _target(entry: Any, parameter: Tensor | None) -> Any:
    """What an entry of the optimizer's state is read into: this worker's shard, a whole tensor, or another object."""
    if not isinstance(entry, stored.TensorStorageMetadata):
        return entry
    if isinstance(parameter, DTensor) and entry.size == parameter.shape and entry.size:
        return like(torch.empty_like(local_shard(parameter), dtype=entry.properties.dtype), parameter)
    return torch.empty(entry.size, dtype=entry.properties.dtype)


def _read(folder: Path, state: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*single process.*")
        dcp.load(state, storage_reader=FolderReader(folder), planner=PlainObjects(), no_dist=True)


def _move(folder: Path, target: Path) -> None:
    """Rename a complete folder; what it replaces is deleted after that."""
    if not target.exists():
        folder.rename(target)
        return
    replaced = folder.with_name(f"{folder.name}.replaced")
    target.rename(replaced)
    folder.rename(target)
    shutil.rmtree(replaced) if replaced.is_dir() else replaced.unlink()
