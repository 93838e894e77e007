"""The index of a checkpoint in a folder, in the format of `torch.distributed.checkpoint`: its writing and its reading.

Folders are laid out as Lightning's ModelParallelStrategy does with ``save_distributed_checkpoint=True``: the index
``.metadata`` has the tensors of the module as ``state_dict`` and those of optimizers, by parameters' names, as
``optimizer_0`` and so on; the rest of Lightning's checkpoint is in ``meta.pt``. torch's `save` and `load` exchange
pickled plans in collectives of all ranks. Here each worker describes its part in JSON, one writes the index, and each
reads the pieces that it needs.

The index is a pickle, and so are objects beside the tensors. torch loads both without restriction, so a changed file
could run code. Here an unpickler that knows only the classes of the index loads it, and objects are loaded with
``weights_only``. The unpickler sets attributes of nothing but new objects of these classes: a pickle may otherwise set
those of a class, a function or an enumeration, for the whole process. Files are named within the folder, and are
regular ones.
"""

from __future__ import annotations

import io
import pickle
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as stored
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata

from unicron_lightning.checkpoints.files import INDEX, MODEL, OPTIMIZER, REST, by_number
from unicron_lightning.checkpoints.pieces import HeldTensor, IndexEntry
from unicron_lightning.errors import ConfigError
from unicron_lightning.private_files import open_stored

_METADATA: Final = "torch.distributed.checkpoint.metadata"
_SET: Final = frozenset(
    {
        *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
        *((_METADATA, f"{name}StorageMetadata") for name in ("Bytes", "Chunk", "Tensor")),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    }
)
"""Classes whose objects have attributes in an index."""
_ALLOWED: Final = frozenset(
    {
        *_SET,
        (_METADATA, "_MEM_FORMAT_ENCODING"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),  # Python 3.13
    }
)


_Python: Final[Any] = vars(pickle)["_Unpickler"]
"""Python's unpickler in Python: the one in C has no hook for BUILD."""


class _Unpickler(_Python):  # type: ignore[misc]
    """Knows the classes of an index, and torch's dtypes; sets attributes of objects of these classes only."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) in _ALLOWED or _is_dtype(module_name, global_name):
            return super().find_class(module_name, global_name)
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is not allowed in it")

    def load_build(self) -> None:
        changed = type(self.stack[-2])
        if (changed.__module__, changed.__qualname__) not in _SET:
            raise pickle.UnpicklingError(f"attributes of an object of {changed.__qualname__} are not set by an index")
        super().load_build()

    dispatch: Final = {**_Python.dispatch, pickle.BUILD[0]: load_build}


def _is_dtype(module_name: str, global_name: str) -> bool:
    return module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype)


def load_index(file: IO[bytes] | io.IOBase, path: str) -> Metadata:
    """Load the index of a checkpoint.

    Args:
        file: the index, open.
        path: its name, for messages.

    Raises:
        ConfigError: it is no index, or names something that no index needs; nothing of it was run.
    """
    try:
        found = _Unpickler(io.BytesIO(file.read())).load()
    except Exception as error:  # noqa: BLE001 - a damaged pickle raises whatever its bytes lead to
        raise ConfigError(f"{path} is no index of a checkpoint: {error}; it was not loaded") from None
    if not isinstance(found, Metadata):
        raise ConfigError(f"{path} is no index of a checkpoint: it holds {type(found).__name__}; expected Metadata")
    places = getattr(found, "storage_data", None) or {}
    if not (isinstance(places, dict) and isinstance(getattr(found, "state_dict_metadata", None), dict)):
        raise ConfigError(f"{path} is no index of a checkpoint: it lists no tensors and places")
    for place in places.values():
        name = getattr(place, "relative_path", None)
        if not isinstance(name, str) or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ConfigError(f"{path} is no index of a checkpoint: it names {name!r}; expected files of its folder")
    return found


def referenced(content: bytes, path: str, *others: str) -> list[str]:
    """Return the names of the files of a checkpoint: those to which its index refers, itself, and others.

    Raises:
        ConfigError: as `load_index`.
    """
    places = (load_index(io.BytesIO(content), path).storage_data or {}).values()
    return sorted({*(place.relative_path for place in places), INDEX, *others})


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


class StoredFolder:
    """The tensors and objects of a checkpoint in a folder.

    Args:
        folder: its path, or URL.

    Attributes:
        entries: descriptions of tensors and objects, by name.

    Raises:
        ConfigError: see `load_index`.
        OSError: there is no index.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = folder
        path = f"{folder}/{INDEX}"
        with open_stored(path) as file:
            index = load_index(file, path)
        self.entries: Mapping[str, Any] = index.state_dict_metadata
        self._places = index.planner_data or {}
        self._stored: Mapping[Any, Any] = index.storage_data or {}

    def read(
        self, choose: Callable[[Sequence[str | int]], bool], make: Callable[[str, Sequence[str | int]], HeldTensor]
    ) -> dict[str, Any]:
        """Return a part of the nested state.

        Args:
            choose: whether an entry is in it, by its path.
            make: returns the piece to be filled of a tensor, by its name and path.
        """
        places = {name: self._places.get(name, (name,)) for name in self.entries}
        chosen = {name: place for name, place in places.items() if choose(place)}
        tensors = {name: make(name, place) for name, place in chosen.items() if self.is_tensor(name)}
        objects = self.fill(tensors.values(), objects=[name for name in chosen if name not in tensors])
        state: dict[str, Any] = {}
        for name, place in chosen.items():
            set_element(state, place, tensors[name].data if name in tensors else objects[name])
        return state

    def is_tensor(self, name: str) -> bool:
        """Whether an entry is a tensor."""
        return isinstance(self.entries[name], stored.TensorStorageMetadata)

    @torch.no_grad()
    def fill(
        self, pieces: Iterable[HeldTensor], *, resized: tuple[str, ...] = (), objects: Iterable[str] = ()
    ) -> dict[str, Any]:
        """Copy stored values into pieces of tensors, whatever pieces are stored; return objects by name.

        Args:
            pieces: to be filled; they may be on any device.
            resized: endings of the names of tensors that may be stored with another shape.
            objects: names of the objects.

        Raises:
            ConfigError: a tensor is missing, or is stored with another shape, or an object is no plain data.
            OSError: a file cannot be read.
        """
        wanted: defaultdict[tuple[str, int, int], list[tuple[Tensor, Any, Any]]] = defaultdict(list)
        for piece in pieces:
            self._check(piece, resized)
            for chunk in self.entries[piece.name].chunks:
                if (common := _common(chunk.offsets, chunk.sizes, piece.offsets, piece.data.shape)) is not None:
                    wanted[self._place(piece.name, chunk.offsets)].append((piece.data, *common))
        names = {self._place(name, None): name for name in objects}
        found = {}
        for path, places in groupby(sorted([*wanted, *names]), lambda place: place[0]):
            with open_stored(f"{self._folder}/{path}") as file:
                for place in places:
                    file.seek(place[1])
                    value = plain_object(io.BytesIO(file.read(place[2])), names.get(place, path))
                    if place in names:
                        found[names[place]] = value
                    for target, there, own in wanted.get(place, ()):
                        target[own].copy_(value[there])
        return found

    def _place(self, name: str, offsets: Any) -> tuple[str, int, int]:
        place = self._stored.get(stored.MetadataIndex(name, offsets))
        if place is None or getattr(place, "transform_descriptors", None):
            raise ConfigError(f"the index of {self._folder} has no readable place of {name}")
        return place.relative_path, place.offset, place.length

    def _check(self, piece: HeldTensor, resized: tuple[str, ...]) -> None:
        there = (
            tuple(self.entries[piece.name].size) if piece.name in self.entries and self.is_tensor(piece.name) else None
        )
        if there != piece.whole and (there is None or not piece.name.endswith(resized)):
            has = "no tensor" if there is None else f"a tensor of shape {there}"
            name = piece.name.removeprefix(f"{MODEL}.")
            raise ConfigError(f"the checkpoint {self._folder} has {has} {name}; expected one of shape {piece.whole}")


def plain_object(content: io.BytesIO, name: str) -> Any:
    """Load a tensor, or an object beside the tensors, as torch.save has written it.

    Raises:
        ConfigError: it is no plain data; nothing of it was run.
    """
    try:
        with torch.serialization.safe_globals([io.BytesIO]):
            return torch.load(content, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ConfigError(f"{name} of the checkpoint is no plain data: {error}; it was not loaded") from None


def _common(
    offsets: Sequence[int], sizes: Sequence[int], own_offsets: Sequence[int], own_sizes: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return the elements that a stored and an own block of a tensor have in common, within each; None for none."""
    ranges = [
        (first, own, max(first, own), min(first + size, own + own_size))
        for first, size, own, own_size in zip(offsets, sizes, own_offsets, own_sizes, strict=True)
    ]
    if any(low >= high for *_, low, high in ranges):
        return None
    there = tuple(slice(low - first, high - first) for first, _, low, high in ranges)
    return there, tuple(slice(low - own, high - own) for _, own, low, high in ranges)


def read_whole(folder: str | Path, keys: Collection[str] | None = None) -> dict[str, Any]:
    """Return the content of a folder's index with whole tensors, in one process.

    Args:
        folder: the checkpoint.
        keys: the parts to read, such as `MODEL`; None: all.

    Raises:
        ConfigError: the index names something that no index needs, or an object is no plain data.
    """
    checkpoint = StoredFolder(folder)

    def whole(name: str, _: Sequence[str | int]) -> HeldTensor:
        entry = checkpoint.entries[name]
        return HeldTensor.of(name, torch.empty(entry.size, dtype=entry.properties.dtype))

    return checkpoint.read(lambda place: keys is None or place[0] in keys, whole)


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
