"""The index of a checkpoint in a folder, in the format of `torch.distributed.checkpoint`.

Folders are laid out as Lightning's ModelParallelStrategy does with ``save_distributed_checkpoint=True``: the index
``.metadata`` has the tensors of the module as ``state_dict`` and those of optimizers, by parameters' names, as
``optimizer_0`` and so on; the rest of Lightning's checkpoint is in ``meta.pt``. torch's `save` exchanges pickled plans
in collectives of all ranks. Here each worker describes its part in JSON, and one writes the index.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

import msgspec
import torch
from torch.distributed.checkpoint import metadata as stored
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.format_utils import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from unicron_lightning.checkpoints.names import MODEL, OPTIMIZER, REST
from unicron_lightning.worker.checkpoint_folders import FolderReader, PlainObjects


class IndexEntry(msgspec.Struct, frozen=True):
    """A shard of a tensor, a whole tensor, or, without ``dtype``, another object, with its place in a file."""

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
        """The key of the entry in torch's index."""
        return stored.MetadataIndex(self.name, None if self.dtype is None else self.offsets)


class WrittenPart(msgspec.Struct, frozen=True):
    """A worker's part of a folder, with the digests of its files, and the name of the version, if it has one."""

    pieces: list[IndexEntry]
    digests: dict[str, str]
    version: str = ""


def encode_index(pieces: Sequence[IndexEntry], places: Mapping[str, Any]) -> bytes:
    """Return the content of `INDEX`.

    Args:
        pieces: of all parts.
        places: path of each entry in the nested state.
    """
    entries: dict[str, Any] = {}
    for piece in pieces:
        if piece.dtype is None:
            entries[piece.name] = stored.BytesStorageMetadata()
            continue
        properties = stored.TensorProperties(dtype=getattr(torch, piece.dtype))
        entry = stored.TensorStorageMetadata(properties, torch.Size(piece.whole), [])
        chunk = stored.ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
        entries.setdefault(piece.name, entry).chunks.append(chunk)
    index = stored.Metadata(entries, planner_data=dict(places), storage_meta=stored.StorageMeta())
    index.storage_data = {p.index: _StorageInfo(p.file, p.start, p.length) for p in pieces}
    index.version = CURRENT_DCP_VERSION
    return pickle.dumps(index)


def check_whole(pieces: Sequence[IndexEntry]) -> None:
    """Check that the pieces of each tensor have as many elements as the tensor.

    Raises:
        ValueError: those of a tensor have not.
    """
    missing: dict[str, int] = {}
    for piece in pieces:
        if piece.dtype is not None:
            missing.setdefault(piece.name, math.prod(piece.whole))
            missing[piece.name] -= math.prod(piece.sizes)
    if found := {name: number for name, number in missing.items() if number}:
        name, number = next(iter(found.items()))
        raise ValueError(
            f"{number} elements of {name} are in no part, or several times in some; {len(found)} such tensors"
        )


def read_whole(folder: str | Path, keys: set[str] | None = None) -> dict[str, Any]:
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


def read_rest(folder: str | Path) -> dict[str, Any]:
    """Return the part of Lightning's checkpoint that is not model or optimizer; it must be plain data."""
    reader = FolderReader(folder)
    with reader.fs.create_stream(reader.fs.concat_path(reader.path, REST), "rb") as file:
        rest: dict[str, Any] = torch.load(cast("IO[bytes]", file), map_location="cpu", weights_only=True)
    return rest


def read_checkpoint(folder: str | Path, *, model_only: bool = False) -> dict[str, Any]:
    """Return a folder's content as Lightning's checkpoint with whole tensors, in one process.

    Raises:
        ConfigError: as `read_whole`.
    """
    content = read_rest(folder)
    state = read_whole(folder, {MODEL} if model_only else None)
    content["state_dict"] = state.pop(MODEL, {})
    names = [name for number in range(len(state)) if (name := f"{OPTIMIZER}{number}") in state]
    if not model_only and (names or "lr_schedulers" in content):
        content["optimizer_states"] = [_numbered(state[name]) for name in names]
    return content


def _numbered(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state by parameters' numbers, as `torch.optim` has it, from one by names."""
    groups = state["param_groups"]
    names = [name for group in groups for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    return {
        "state": {numbers[name]: values for name, values in state.get("state", {}).items()},
        "param_groups": [{**group, "params": [numbers[name] for name in group["params"]]} for group in groups],
    }
