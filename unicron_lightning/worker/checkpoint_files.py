"""SHA-256 of checkpoints: computed while they are written, and again before they are loaded.

The digest of a file is its SHA-256. That of a folder is the SHA-256 of its manifest: the output of sha256sum for all
its files, sorted by name.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from threading import Thread
from typing import IO, Any, Final, cast

from unicron_lightning.regular_files import open_stored

INDEX: Final = ".metadata"
"""Name of the index in a folder of `torch.distributed.checkpoint`."""
REST: Final = "meta.pt"
"""Name of the file beside the index, with the part of Lightning's checkpoint that is not model or optimizer."""

_LARGE: Final = 1 << 20
"""Bytes from which a thread of its own computes the digest, while the file is written."""
_CHUNK: Final = 1 << 22
_WHOLE: Final = ""
"""Name of a file that is the whole checkpoint."""


class HashingFile:
    """Computes the SHA-256 of what is written to a file, front to back.

    Args:
        file: open for writing.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()

    @property
    def digest(self) -> str:
        """Digest of what was written so far."""
        return self._hash.hexdigest()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if len(view) < _LARGE:
            self._hash.update(view)
            return self._file.write(view)
        hashing = Thread(target=self._hash.update, args=(view,), name="unicron-digest", daemon=True)
        hashing.start()
        try:
            return self._file.write(view)
        finally:
            hashing.join()

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()


class OpenCheckpoint:
    """A checkpoint that is held open: what was checked is what is loaded, even if its path gets another file meanwhile.

    Args:
        name: path of a file or folder, or URL of a file, which is not held.

    Attributes:
        path: under which the held file or folder is read.

    Raises:
        OSError: it cannot be opened, or is neither a file nor a folder.
    """

    def __init__(self, name: str) -> None:
        self.name = self.path = name
        self._descriptor: int | None = None
        if "://" not in name:
            self._descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would block
            self.path = f"/proc/self/fd/{self._descriptor}"
            kind = os.fstat(self._descriptor).st_mode
            if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
                self.close()
                raise OSError(f"{name} is no regular file or folder")

    def digests(self, part: int = 0, parts: int = 1) -> dict[str, str]:
        """Return the digest of each file, by its name within the folder.

        Args:
            part: which part of a folder's files to read, from 0. A file that is the whole checkpoint is always read.
            parts: number of parts.

        Raises:
            OSError: a file cannot be read.
        """
        if self._descriptor is None:
            there = _names_at(self.path)
        else:
            there = names(self.path) if Path(self.path).is_dir() else None
        return {_WHOLE: _digest(self.path)} if there is None else folder_digests(self.path, there[part::parts])

    def close(self) -> None:
        """Release it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _names_at(url: str) -> list[str] | None:
    """Return the files of a checkpoint that is not one file, as its index names them; None if it is one file."""
    import fsspec  # type: ignore[import-untyped]  # for URLs only

    from unicron_lightning.checkpoints.index import referenced

    files, root = fsspec.core.url_to_fs(url)
    if not files.isfile(f"{root}/{INDEX}"):
        return None
    return referenced(files.cat_file(f"{root}/{INDEX}"), url, REST)


def names(folder: str | Path) -> list[str]:
    """Return the files of a folder and of its folders, relative to it, in order."""
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if not path.is_dir())


def folder_digests(folder: str | Path, files: list[str]) -> dict[str, str]:
    """Return the digests of some files of a folder, or at a URL.

    Raises:
        OSError: a file cannot be read, or is a pipe or the like.
    """
    return {name: _digest(f"{folder}/{name}") for name in files}


def total(digests: Mapping[str, str]) -> str:
    """Return the digest of a checkpoint, given those of its files."""
    if set(digests) == {_WHOLE}:
        return digests[_WHOLE]
    manifest = "".join(f"{digests[name]}  {name}\n" for name in sorted(digests))
    return hashlib.sha256(manifest.encode(errors="surrogateescape")).hexdigest()


def digest_of(name: str) -> str:
    """Return the digest of the checkpoint at a path or URL.

    Raises:
        OSError: it cannot be read.
    """
    checkpoint = OpenCheckpoint(name)
    try:
        return total(checkpoint.digests())
    finally:
        checkpoint.close()


def size_of(name: str) -> int | None:
    """Return the bytes of a file or folder; None if it cannot be seen, and for a URL."""
    path = Path(name)
    try:
        if "://" in name:
            return None
        return sum((path / each).stat().st_size for each in names(path)) if path.is_dir() else path.stat().st_size
    except OSError:
        return None


def _digest(path: str) -> str:
    found = hashlib.sha256()
    with open_stored(path) as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    return found.hexdigest()


def located(path: Any) -> str:
    """Return a URL as it is, and a path as an absolute one."""
    return str(path) if "://" in str(path) else str(Path(cast(str, path)).absolute())
