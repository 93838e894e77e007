"""Logs of a daemon's agents, in files that are rotated when they are full.

Each stream of a task comes through a named pipe into a file that belongs to the daemon alone. torchrun's own files
would grow for as long as a task trains. If the daemon dies, the contents of the pipe are lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from io import FileIO
from pathlib import Path
from typing import Final

from unicron_lightning.private_files import make_private, open_private

logger = logging.getLogger(__name__)

_CHUNK_BYTES: Final = 1 << 16


class RotatingFile:
    """A file that becomes ``NAME.1`` when it is full, and that ``NAME.2``, and so on; the oldest is dropped.

    Args:
        path: the file; its folder is created. It is appended to if it exists.
        size: bytes at which it is full. A chunk is never divided.
        number: files kept beside the current one.
    """

    def __init__(self, path: Path, size: int, number: int) -> None:
        self._path = path
        self._most = size
        self._number = number
        make_private(path.parent)
        self._file = _append(path)
        self._size = self._file.tell()

    def write(self, data: bytes) -> None:
        """Append; unwritable data, e.g. on a full disk, is dropped, since logging must not stop the task."""
        try:
            if self._size and self._size + len(data) > self._most:
                self._turn_over()
            self._file.write(data)
            self._size += len(data)
        except OSError as error:
            logger.debug("log_not_written path=%s error=%s", self._path, error)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _turn_over(self) -> None:
        names = [self._path, *(self._path.with_name(f"{self._path.name}.{n}") for n in range(1, self._number + 1))]
        self._file.close()
        for older, newer in zip(reversed(names), reversed(names[:-1]), strict=False):
            with contextlib.suppress(FileNotFoundError):
                newer.replace(older)
        if len(names) == 1:
            self._path.unlink(missing_ok=True)
        self._file = _append(self._path)
        self._size = 0


def _append(path: Path) -> FileIO:
    return FileIO(path, "ab", opener=open_private)


class LogPipe:
    """A named pipe whose other end is written to by any number of processes, one after the other.

    Args:
        path: path of the pipe.
        file: receives the data; closed with the pipe.
    """

    def __init__(self, path: Path, file: RotatingFile) -> None:
        self._path = path
        self._file = file
        os.mkfifo(path, 0o600)
        # Also open for writing: otherwise it is at its end whenever no process has it open.
        self._descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        asyncio.get_running_loop().add_reader(self._descriptor, self._read)

    def note(self, text: str) -> None:
        """Add a line of the daemon's own."""
        self._file.write(f"---- {text}\n".encode())

    def close(self) -> None:
        """Read the remaining data, and remove the pipe."""
        asyncio.get_running_loop().remove_reader(self._descriptor)
        while self._read():
            pass
        os.close(self._descriptor)
        self._path.unlink(missing_ok=True)
        self._file.close()

    def _read(self) -> bool:
        try:
            data = os.read(self._descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        self._file.write(data)
        return bool(data)
