"""Folders in the format of `torch.distributed.checkpoint`: hashed while written, read without running their contents.

The format's index, ``.metadata``, is a pickle, and so are objects beside the tensors. torch loads both without
restriction, so a changed file could run code. Here an unpickler that knows only the classes of the index loads it, and
objects are loaded with ``weights_only``. The unpickler sets attributes of nothing but new objects of these classes: a
pickle may otherwise set those of a class, a function or an enumeration, for the whole process. Files are named within
the folder, and are regular ones.
"""

from __future__ import annotations

import io
import os
import pickle
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, Final, cast

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from typing_extensions import override

from unicron_lightning.errors import ConfigError
from unicron_lightning.regular_files import open_regular
from unicron_lightning.worker.checkpoint_files import INDEX, HashingFile

if TYPE_CHECKING:
    from collections.abc import Iterator

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


class RegularFiles(FileSystem):
    """Opens regular files only."""

    @override
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with open(path, mode, opener=open_regular) as stream:
            yield stream


class FolderReader(FileSystemReader):
    """Reads files of a checkpoint, and its index by `load_index`.

    Args:
        path: of the folder, or its URL.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        if "://" in str(path):
            from torch.distributed.checkpoint._fsspec_filesystem import FileSystem as UrlFiles

            self.fs = cast("FileSystem", UrlFiles())
            self.path = self.fs.init_path(str(path))
        else:
            self.fs = RegularFiles()

    @override
    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        path = self.fs.concat_path(self.path, INDEX)
        with self.fs.create_stream(path, "rb") as file:
            metadata = load_index(file, str(path))
        storage = metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        storage.load_id = self.load_id
        return metadata


class PlainObjects(DefaultLoadPlanner):
    """Loads objects beside the tensors with ``weights_only``; a base class of torch's planners."""

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # torch's own then loads what was just found to be plain.
        try:
            with torch.serialization.safe_globals([io.BytesIO]):
                torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            name = read_item.dest_index.fqn
            raise ConfigError(f"{name} of the checkpoint is no plain data: {error}; it was not loaded") from None
        value.seek(0)
        super().load_bytes(read_item, value)


class HashingFiles(FileSystem):
    """Computes the digests of the files that torch's writer writes.

    Attributes:
        digests: of each file, by its name.
    """

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}

    @override
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            hashing = HashingFile(cast("IO[bytes]", stream))
            yield hashing
        self.digests[Path(path).name] = hashing.digest

    @override
    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.digests[Path(new_path).name] = self.digests.pop(Path(path).name)
