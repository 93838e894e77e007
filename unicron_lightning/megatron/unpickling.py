"""Reads checkpoints of megatron-core without running anything that is in their files.

The format's index, ``.metadata``, is a pickle, and so are objects beside the tensors. torch loads both without
restriction, so a changed file could run code. `restricted` has them loaded by an unpickler that knows only the classes
of the index, and by ``weights_only``. For megatron-core 0.16, whose module holds both names.
"""

from __future__ import annotations

import io
import pickle
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, Final

import torch
from megatron.core.dist_checkpointing.strategies import torch as torch_format
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from typing_extensions import override

from unicron_lightning.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

INDEX: Final = ".metadata"
_METADATA: Final = "torch.distributed.checkpoint.metadata"
_ALLOWED: Final = frozenset(
    {
        *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
        *((_METADATA, f"{name}StorageMetadata") for name in ("Bytes", "Chunk", "Tensor")),
        (_METADATA, "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),  # Python 3.13
    }
)


class _Unpickler(pickle.Unpickler):
    """Knows the classes of an index, and torch's dtypes."""

    @override
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) in _ALLOWED or _is_dtype(module_name, global_name):
            return super().find_class(module_name, global_name)
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is not allowed in it")


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
    return found


class _Reader(FileSystemReader):
    """Reads files of a checkpoint, and its index by `load_index`."""

    @override
    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        path = self.fs.concat_path(self.path, INDEX)
        with self.fs.create_stream(path, "rb") as file:
            metadata = load_index(file, str(path))
        storage = metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        storage.load_id = self.load_id
        return metadata


class _Planner(torch_format.MCoreLoadPlanner):
    """Loads objects beside the tensors with ``weights_only``."""

    @override
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        # torch's own then loads what was just found to be plain.
        try:
            with torch.serialization.safe_globals([io.BytesIO]):
                torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            name = read_item.dest_index.fqn
            raise ConfigError(f"{name} of the checkpoint is no plain data: {error}; it was not loaded") from None
        value.seek(0)
        super().load_bytes(read_item, value)


@contextmanager
def restricted() -> Iterator[None]:
    """Have megatron-core load checkpoints in this process with `_Reader` and `_Planner`."""
    reader, planner = torch_format._get_filesystem_reader, torch_format.MCoreLoadPlanner

    def safe(checkpoint_dir: str | Path, **_: Any) -> _Reader:
        return _Reader(checkpoint_dir)

    torch_format._get_filesystem_reader, torch_format.MCoreLoadPlanner = safe, _Planner
    try:
        yield
    finally:
        torch_format._get_filesystem_reader, torch_format.MCoreLoadPlanner = reader, planner
