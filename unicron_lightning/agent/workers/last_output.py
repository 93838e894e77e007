"""Last lines of the output of workers that ended before they could report anything, such as a script with a wrong path.

Workers write to files that torchrun was given: its own standard error, if that is a regular file, or the log files of a
daemon. The present size of each file is recorded before a round's workers start. Output to a terminal or a pipe is
not read.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Final

from unicron_lightning import environ
from unicron_lightning.regular_files import open_regular

_OWN: Final = Path("/proc/self/fd/2")
_MOST_BYTES: Final = 16_384
_LINES: Final = 6
_LINE_LENGTH: Final = 200
_FOREIGN: Final = re.compile(r"[A-Z]\d{4} \d\d:\d\d:\d\d|---- |[a-z_]+ (task|agent|worker|reason)=")
"""Beginning of a line that torchelastic, a daemon or an agent has written into the same file."""


class LastOutput:
    """Output of the workers of one agent.

    Args:
        folder: log files ``rank<local rank>.log`` of a daemon; None: workers write to this process's standard error.
        own: path of that standard error; replaced in tests.
    """

    def __init__(self, folder: Path | None = None, own: Path = _OWN) -> None:
        self._folder = folder
        self._own = own
        self._begun: dict[Path, int] = {}

    def begin(self, local_world: int) -> None:
        """Record where the output of the workers begins that are about to start."""
        self._begun = {path: _size(path) for path in {self._path(rank) for rank in range(local_world)}}

    def lines(self, local_rank: int) -> tuple[str, ...]:
        """Return the last lines of a worker, without control characters; none if they cannot be read.

        With a shared file they may be those of a sibling.
        """
        path = self._path(local_rank)
        text = _read(path, self._begun.get(path, 0)).decode(errors="replace")
        lines = [line.rstrip() for line in text.splitlines() if line.strip() and not _FOREIGN.match(line)]
        return tuple("".join(filter(str.isprintable, line))[:_LINE_LENGTH] for line in lines[-_LINES:])

    def _path(self, local_rank: int) -> Path:
        return self._own if self._folder is None else self._folder / f"rank{local_rank}.log"


def folder_of_logs() -> Path | None:
    """Return the folder in which a daemon keeps the output of this process's workers, if one does."""
    folder = os.environ.get(environ.LOGS)
    return None if folder is None else Path(folder)


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def _read(path: Path, begin: int) -> bytes:
    """Read the end of a regular file that has grown since; a file that was rotated meanwhile is read from its start."""
    with contextlib.suppress(OSError), open(path, "rb", opener=open_regular) as file:
        about = os.fstat(file.fileno())
        begin = begin if begin <= about.st_size else 0
        file.seek(max(begin, about.st_size - _MOST_BYTES))
        return file.read(_MOST_BYTES)
    return b""
