"""The place of a checkpoint while it is written: a folder that is renamed once it is complete, or objects at a URL.

Names in a folder: ``__P_R.distcp`` has the tensors of part P as rank R has written them, ``part-P-R.json`` describes
them, ``objects.distcp`` the objects of the index, ``failed-R`` is the word of a rank that cannot write.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Protocol

from unicron_lightning.worker.checkpoint_files import HashingFile
from unicron_lightning.worker.checkpoint_folders import INDEX

UNFINISHED: Final = "unfinished"


class VersionStorage(Protocol):
    """Files of one version, until it is complete."""

    def begin(self) -> None:
        """Prepare to write; called by each writer."""

    def names(self) -> list[str]:
        """Return the names of the complete files; none if there is no place any more."""

    def create(self, name: str) -> contextlib.AbstractContextManager[HashingFile]:
        """Open a file for writing; it is there once it is complete."""

    def read(self, name: str) -> bytes:
        """Return a file's content."""

    def remove(self, name: str) -> None:
        """Delete a file, if it is there."""

    def publish(self, index: bytes) -> None:
        """Write the index, as the last file of all, and move the version to its path."""

    def published(self) -> VersionStorage:
        """Return the files at the path of the checkpoint: of this version, once it is complete, or of another one."""

    def abandon(self) -> None:
        """Delete the files."""


class FolderStorage:
    """A folder of a file system that all workers see.

    Args:
        target: path of the checkpoint.
        version: name of the version.
    """

    def __init__(self, target: Path, version: str) -> None:
        self._target = target
        self._folder = target.with_name(f"{target.name}.{version}.{UNFINISHED}")

    def begin(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)

    def names(self) -> list[str]:
        try:
            return [name for name in os.listdir(self._folder) if not name.endswith(".tmp")]
        except FileNotFoundError:
            return []

    @contextmanager
    def create(self, name: str) -> Iterator[HashingFile]:
        path = self._folder / f"{name}.tmp"
        with path.open("wb") as file:
            hashing = HashingFile(file)
            yield hashing
            file.flush()
            os.fsync(file.fileno())
        path.rename(self._folder / name)

    def read(self, name: str) -> bytes:
        return (self._folder / name).read_bytes()

    def remove(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)

    def publish(self, index: bytes) -> None:
        with self.create(INDEX) as file:
            file.write(index)
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

    def published(self) -> FolderStorage:
        there = FolderStorage(self._target, "")
        there._folder = self._target
        return there

    def abandon(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
