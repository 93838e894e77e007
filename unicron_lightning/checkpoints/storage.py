"""The place of a checkpoint while it is written: a folder that is renamed once it is complete, or objects at a URL.

Names of files: ``__P_R.distcp`` has the tensors of part P as rank R has written them, ``part-P-R.json`` describes them,
``objects.distcp`` the objects of the index, ``failed-R`` is the word of a rank that cannot write. At a URL the files of
a version have its name as prefix, since objects cannot be renamed, and a version is complete when the index refers to
them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from unicron_lightning.checkpoints.files import INDEX, REST, HashingFile
from unicron_lightning.private_files import read_regular

DATA_SUFFIX: Final = ".distcp"
"""Of files with tensors, as torch's writer names them."""
UNFINISHED: Final = "unfinished"
STALE_SECONDS: Final = 3600.0
"""Age of a version's folder, unchanged since, from which no writer can be alive that uses it."""
_VERSION: Final = re.compile(rf"\.\d+-[0-9a-f]{{12}}\.{UNFINISHED}$")


class FolderStorage:
    """A folder of a file system that all workers see.

    Args:
        target: path of the checkpoint.
        version: name of the version.

    Attributes:
        prefix: before the names of the version's files, in the checkpoint.
    """

    prefix = ""

    def __init__(self, target: Path, version: str) -> None:
        self._target = target
        self._folder = target.with_name(f"{target.name}.{version}.{UNFINISHED}")

    def begin(self) -> None:
        """Prepare to write; called by each writer that writes a file."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for folder in self._folder.parent.glob(f"*.{UNFINISHED}"):  # of workers that have all died
            with contextlib.suppress(FileNotFoundError):
                if _VERSION.search(folder.name) and time.time() - folder.stat().st_mtime > STALE_SECONDS:
                    shutil.rmtree(folder, ignore_errors=True)

    def names(self) -> list[str]:
        """Return the names of the version's complete files; none if there is no place any more."""
        return _files(self._folder)

    @contextmanager
    def create(self, name: str) -> Iterator[HashingFile]:
        """Open a file of the version for writing; it is there once it is complete."""
        path = self._folder / f"{name}.{os.getpid()}.tmp"
        with path.open("wb") as file:
            hashing = HashingFile(file)
            yield hashing
            file.flush()
            os.fsync(file.fileno())
        path.rename(self._folder / name)

    def read(self, name: str) -> bytes:
        """Return the content of a file of the version."""
        return read_regular(self._folder / name)

    def remove(self, name: str) -> None:
        """Delete a file of the version, if it is there."""
        (self._folder / name).unlink(missing_ok=True)

    def publish(self, files: Mapping[str, bytes]) -> None:
        """Write files in their order, with the index as the last one of all, such that the version is at its path."""
        for name, data in files.items():
            with self.create(name) as file:
                file.write(data)
        for path in self._folder.glob("*.tmp"):  # of writers that have died
            path.unlink(missing_ok=True)
        replaced = self._folder.with_name(f"{self._folder.name}.replaced")
        if self._target.exists() or self._target.is_symlink():
            self._target.rename(replaced)
        self._folder.rename(self._target)
        if replaced.is_dir() and not replaced.is_symlink():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            replaced.unlink(missing_ok=True)

    def published(self) -> list[str]:
        """Return the names of the files that are part of the checkpoint at the path, whatever its version is."""
        return _files(self._target)

    def read_published(self, name: str) -> bytes:
        """Return the content of a file of the checkpoint at the path."""
        return read_regular(self._target / name)

    def clean(self) -> None:
        """Delete files of the version that are not part of the published one."""
        self.abandon()

    def abandon(self) -> None:
        """Delete the files."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _files(folder: Path) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if not name.endswith(".tmp")]
    except FileNotFoundError:
        return []


class UrlStorage:
    """Objects at a URL, through fsspec and the package of its protocol; the methods are those of `FolderStorage`.

    Args:
        target: URL of the checkpoint.
        version: name of the version.
    """

    def __init__(self, target: str, version: str) -> None:
        import fsspec  # type: ignore[import-untyped]  # for URLs only

        self.prefix = f"{version}/"
        self._files: Any
        self._files, self._root = fsspec.core.url_to_fs(target, use_listings_cache=False)

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def begin(self) -> None:
        self._files.makedirs(self._at(self.prefix.rstrip("/")), exist_ok=True)

    def names(self) -> list[str]:
        try:
            found = self._files.ls(self._at(self.prefix.rstrip("/")), detail=False)
        except FileNotFoundError:
            return []
        return [path.rsplit("/", 1)[-1] for path in found]

    @contextmanager
    def create(self, name: str) -> Iterator[HashingFile]:
        with self._files.open(self._at(self.prefix + name), "wb") as file:
            yield HashingFile(file)

    def read(self, name: str) -> bytes:
        return self.read_published(self.prefix + name)

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._at(self.prefix + name))

    def publish(self, files: Mapping[str, bytes]) -> None:
        before = {name for name in self.published() if "/" in name}
        for name, data in files.items():
            self._files.pipe_file(self._at(name), data)
        for folder in {name.rsplit("/", 1)[0] for name in before} - {self.prefix.rstrip("/")}:
            with contextlib.suppress(FileNotFoundError):
                self._files.rm(self._at(folder), recursive=True)

    def published(self) -> list[str]:
        from unicron_lightning.checkpoints.index import referenced  # late, as is `index` in `version`

        try:
            return referenced(self.read_published(INDEX), self._at(INDEX), REST)
        except FileNotFoundError:
            return []

    def read_published(self, name: str) -> bytes:
        content: bytes = self._files.cat_file(self._at(name))
        return content

    def clean(self) -> None:
        """Leave all: what late writers add has the names of what is there."""

    def abandon(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.rm(self._at(self.prefix.rstrip("/")), recursive=True)


VersionStorage = FolderStorage | UrlStorage
"""Files of one version, until it is complete."""


def storage_of(path: str, version: str) -> VersionStorage:
    """Return the place of a version.

    Args:
        path: of the checkpoint, or URL.
        version: its name.
    """
    return UrlStorage(path, version) if "://" in path else FolderStorage(Path(path), version)
