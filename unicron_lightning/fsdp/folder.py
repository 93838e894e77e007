"""Checkpoints of a sharded model as folders in the format of `torch.distributed.checkpoint`: a file for each shard.

A folder is laid out as Lightning's ModelParallelStrategy does with ``save_distributed_checkpoint=True``: the index has
the tensors of the module as ``state_dict`` and those of the optimizer, by parameters' names, as ``optimizer_0``; the
rest of Lightning's checkpoint is in ``meta.pt``. torch's `save` exchanges pickled plans in collectives of all ranks.
Here each worker plans its own part and describes it in JSON, and the first one writes the index. To read a part needs
no communication. Workers must share the file system.
"""

from __future__ import annotations

import dataclasses
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import metadata as stored
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.format_utils import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from unicron_lightning.errors import ConfigError
from unicron_lightning.fsdp.mesh import local_shard
from unicron_lightning.fsdp.whole import like, load_optimizer
from unicron_lightning.worker.checkpoint_folders import INDEX, FolderReader, HashingFiles, PlainObjects

MODEL: Final = "state_dict"
OPTIMIZER: Final = "optimizer_0"
REST: Final = "meta.pt"


class _Piece(msgspec.Struct, frozen=True):
    """An entry of the index: a shard of a tensor, a whole tensor, or, without ``dtype``, another object."""

    name: str
    file: str
    start: int
    length: int
    dtype: str | None = None
    whole: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()

    @property
    def index(self) -> stored.MetadataIndex:
        return stored.MetadataIndex(self.name, None if self.dtype is None else self.offsets)


class _Part(msgspec.Struct, frozen=True):
    """A worker's part of a folder, with the digests of its files."""

    pieces: list[_Piece]
    digests: dict[str, str]


def is_folder(path: str | Path) -> bool:
    """Whether a checkpoint is a folder in this format."""
    return (Path(path) / INDEX).is_file() and (Path(path) / REST).is_file()


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
    return msgspec.json.encode(_Part(pieces, files.digests))


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
    known = [msgspec.json.decode(part, type=_Part) for part in parts]
    files, writer = HashingFiles(), dcp.FileSystemWriter(folder)
    writer.fs = files
    pieces = [piece for part in known for piece in part.pieces]
    entries: dict[str, Any] = {}
    for piece in pieces:
        if piece.dtype is None:
            entries[piece.name] = stored.BytesStorageMetadata()
            continue
        properties = stored.TensorProperties(dtype=getattr(torch, piece.dtype))
        entry = stored.TensorStorageMetadata(properties, torch.Size(piece.whole), [])
        chunk = stored.ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
        entries.setdefault(piece.name, entry).chunks.append(chunk)
    found = [WriteResult(p.index, p.length, _StorageInfo(p.file, p.start, p.length)) for p in pieces]
    writer.finish(stored.Metadata(entries, planner_data=dict(places)), [found])
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


def load_optimizer_part(folder: Path, module: nn.Module, optimizer: Optimizer) -> None:
    """Read this worker's shards of the optimizer's state; nothing if the folder has none.

    Raises:
        ConfigError: the optimizer has other groups of parameters.
    """
    names = _group_names(module, optimizer)
    parameters = dict(zip(_flat(names), _parameters(optimizer), strict=True))
    index = FolderReader(folder).read_metadata()
    state: dict[str, Any] = {}
    for key, entry in index.state_dict_metadata.items():
        place = (index.planner_data or {}).get(key, ())
        if place[:1] == (OPTIMIZER,):
            about = parameters.get(place[2]) if place[1] == "state" else None
            set_element(state, place, _target(entry, about))
    if not state:
        return
    _read(folder, state)
    own = state[OPTIMIZER]
    groups = own["param_groups"]
    if [sorted(group["params"]) for group in groups] != [sorted(group) for group in names]:
        raise ConfigError(f"the checkpoint {folder} has other groups of the optimizer's parameters than the module")
    numbers = {name: number for number, name in enumerate(_flat(names))}
    entries = {
        numbers[name]: {
            key: local_shard(value) if isinstance(value, Tensor) else value for key, value in values.items()
        }
        for name, values in own.get("state", {}).items()
    }
    restored = [{**group, "params": [numbers[name] for name in own]} for group, own in zip(groups, names, strict=True)]
    load_optimizer(optimizer, {"state": entries, "param_groups": restored}, whole=False)


def read_whole(folder: Path, keys: set[str] | None = None) -> dict[str, Any]:
    """Return the content of a folder's index with whole tensors, in one process.

    Args:
        folder: the checkpoint.
        keys: the parts to read, such as `MODEL`; None: all.

    Raises:
        ConfigError: the index names something that no index needs; torch would report it as another error.
    """
    FolderReader(folder).read_metadata()
    state: dict[str, Any] = {}
    planner: Any = _Whole
    _load_state_dict(state, storage_reader=FolderReader(folder), planner=planner(keys), no_dist=True)
    return state


class _Whole(PlainObjects, _EmptyStateDictLoadPlanner):
    """Makes the whole tensors that the index names."""


def read_rest(folder: Path) -> dict[str, Any]:
    """Return the part of Lightning's checkpoint that is not model or optimizer; it must be plain data."""
    rest: dict[str, Any] = torch.load(folder / REST, map_location="cpu", weights_only=True)
    return rest


def _named(module: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """The state of a module and its optimizer, by names, as torch's `get_optimizer_state_dict` gives it."""
    state: dict[str, Any] = {MODEL: {name: each.detach() for name, each in module.state_dict(keep_vars=True).items()}}
    if optimizer is not None:
        names, own = _group_names(module, optimizer), optimizer.state_dict()
        flat = _flat(names)
        groups = [{**group, "params": own} for group, own in zip(own["param_groups"], names, strict=True)]
        state[OPTIMIZER] = {
            "state": {flat[number]: values for number, values in own["state"].items()},
            "param_groups": groups,
        }
    return state


def _group_names(module: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """The name of each parameter of an optimizer, by group; the first one of a parameter with several."""
    names: dict[int, str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), name)
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _flat(names: Sequence[Sequence[str]]) -> list[str]:
    return [name for group in names for name in group]


def _is_own(item: WriteItem, shard: int) -> bool:
    """Whether this worker writes an entry: its shards with elements; the first worker also what is not divided."""
    if item.type != WriteItemType.SHARD:
        return shard == 0
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes.numel() > 0


def _piece(item: WriteItem, result: WriteResult) -> _Piece:
    data, at = item.tensor_data, result.storage_data
    place = {"name": item.index.fqn, "file": at.relative_path, "start": at.offset, "length": at.length}
    if data is None:
        return _Piece(**place)
    dtype = str(data.properties.dtype).removeprefix("torch.")
    return _Piece(
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
