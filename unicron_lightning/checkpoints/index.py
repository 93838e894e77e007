"""The index of a checkpoint in a folder, in the format of `torch.distributed.checkpoint`.

Folders are laid out as Lightning's ModelParallelStrategy does with ``save_distributed_checkpoint=True``: the index
``.metadata`` has the tensors of the module as ``state_dict`` and those of optimizers, by parameters' names, as
``optimizer_0`` and so on; the rest of Lightning's checkpoint is in ``meta.pt``. torch's `save` exchanges pickled plans
in collectives of all ranks. Here each worker describes its part in JSON, and one writes the index.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as stored
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.format_utils import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from unicron_lightning.checkpoints.names import MODEL, OPTIMIZER, by_number
from unicron_lightning.checkpoints.parts import IndexEntry
from unicron_lightning.regular_files import open_stored
from unicron_lightning.worker.checkpoint_files import REST
from unicron_lightning.worker.checkpoint_folders import FolderReader, PlainObjects


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
    keys = [stored.MetadataIndex(p.name, None if p.dtype is None else p.offsets) for p in pieces]
    index.storage_data = {key: _StorageInfo(p.file, p.start, p.length) for key, p in zip(keys, pieces, strict=True)}
    index.version = CURRENT_DCP_VERSION
    return pickle.dumps(index)


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
    with open_stored(f"{folder}/{REST}") as file:
        rest: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
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
        states = [state[name] for name in names]
        content["optimizer_states"] = [by_number(own, [g["params"] for g in own["param_groups"]]) for own in states]
    return content
