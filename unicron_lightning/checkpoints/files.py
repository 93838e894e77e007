"""Files of checkpoints, without torch: their digests, their names, and the records of complete ones.

The SHA-256 of a checkpoint is computed while it is written, and again before it is loaded. That of a folder is the
SHA-256 of its manifest: the output of sha256sum for all its files, sorted by name.

What completes a checkpoint leaves a record in the agent's private folder before it notifies anybody: a worker, or its
writer, which outlives it. If all workers die or fail before their reports arrive, those of the next life find the
records of their agents, and of others on their machines that were killed. A record has the digest, so that the
checkpoint is checked as one that was reported. The agent reports the record of a worker that dies, since it may not run
a worker of the next life at its start; what a writer completes later is found.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import IO, Any, Final, cast

import msgspec

from unicron_lightning import wire
from unicron_lightning.private_files import open_stored, read_regular

logger = logging.getLogger(__name__)

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
            OSError: a file cannot be read, or is a pipe or the like.
        """
        if self._descriptor is None:
            there = _names_at(self.path)
        else:
            there = names(self.path) if Path(self.path).is_dir() else None
        if there is None:
            return {_WHOLE: _digest(self.path)}
        return {name: _digest(f"{self.path}/{name}") for name in there[part::parts]}

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


MODEL: Final = "state_dict"
OPTIMIZER: Final = "optimizer_"
"""Followed by the number of the optimizer."""


def is_folder(path: str | Path) -> bool:
    """Whether a checkpoint is a folder, or objects under a URL, in this format."""
    if "://" in str(path):
        import fsspec  # for URLs only

        files, root = fsspec.core.url_to_fs(str(path))
        return all(files.isfile(f"{root}/{name}") for name in (INDEX, REST))
    return (Path(path) / INDEX).is_file() and (Path(path) / REST).is_file()


def by_name(state: Mapping[str, Any], names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return an optimizer's state by parameters' names, from its `state_dict`.

    Args:
        state: by numbers.
        names: of the parameters of each group.
    """
    flat = [name for group in names for name in group]
    groups = [{**group, "params": list(own)} for group, own in zip(state["param_groups"], names, strict=True)]
    entries = {flat[key] if isinstance(key, int) else key: values for key, values in state["state"].items()}
    return {"state": entries, "param_groups": groups}


def by_number(state: Mapping[str, Any], names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return an optimizer's state as its `state_dict` has it, from one by names: the inverse of `by_name`.

    Args:
        state: by names.
        names: of the parameters of each group, in the optimizer's order.
    """
    numbers = {name: number for number, name in enumerate(name for group in names for name in group)}
    groups = [
        {**group, "params": [numbers[name] for name in own]}
        for group, own in zip(state["param_groups"], names, strict=True)
    ]
    entries = {numbers.get(name, name): values for name, values in state.get("state", {}).items()}
    return {"state": entries, "param_groups": groups}


_PREFIX: Final = "complete-"


RECORD_SECONDS: Final = 86400.0
"""Time for which the records of an agent that was killed are kept."""


def record_path(folder: Path, run: str, pid: int | None = None) -> Path:
    """Return where a worker (None: this one), and its writer, leave the record of their newest checkpoint.

    Args:
        folder: of the agent.
        run: of the task, see `wire.Welcome`.
        pid: the worker's process.
    """
    return folder / f"{_PREFIX}{run}-{os.getpid() if pid is None else pid}"


def leave_record(place: Path, path: str, step: int, digest: str, fit: int) -> None:
    """Leave the record of a complete checkpoint, in place of the one before.

    Args:
        place: of the record, see `record_path`.
        path: of the checkpoint, or its URL.
        step: optimizer steps finished in it.
        digest: of the checkpoint.
        fit: of the script, in which it was written.

    Raises:
        OSError: the folder is gone, or cannot be written to.
    """
    found = wire.Checkpoint(path=path, step=step, digest=digest, life=0, bytes=size_of(path), fit=fit)
    partial = place.with_suffix(f".{os.getpid()}")
    partial.write_bytes(msgspec.json.encode(found))
    partial.rename(place)


def record_of(folder: Path, pid: int) -> wire.Checkpoint | None:
    """Return the newest checkpoint that a worker of an agent has completed, unread; None without a record."""
    try:
        return msgspec.json.decode(read_regular(next(folder.glob(f"{_PREFIX}*-{pid}"))), type=wire.Checkpoint)
    except (OSError, StopIteration, msgspec.MsgspecError):
        return None


def left_records(record: Path, reported: Sequence[wire.Checkpoint]) -> list[wire.Checkpoint]:
    """Return the checkpoints in records that are newer than those reported, and as they were written.

    Args:
        record: of this worker. Its agent's folder is searched, and those of other agents of this user on this machine
            for records of the same run: agents that were killed may have reported none.
        reported: checkpoints that the coordinator knows.
    """
    newest = min(map(age, reported), default=(0, 0))
    found: list[wire.Checkpoint] = []
    prefix, _, _ = record.name.rpartition("-")
    others = record.parent.parent.glob(f"*/{prefix}-*") if prefix != _PREFIX else ()
    for place in (*record.parent.glob(f"{_PREFIX}*"), *others):
        try:
            checkpoint = msgspec.json.decode(read_regular(place), type=wire.Checkpoint)
            if age(checkpoint) < newest and checkpoint not in found and digest_of(checkpoint.path) == checkpoint.digest:
                found.append(checkpoint)
        except Exception as error:  # noqa: BLE001 - a storage's package raises errors of its own
            logger.info("checkpoint_record_left_out record=%s reason=%s", place, error)
    return sorted(found, key=age)


def young_records(folder: Path) -> set[Path]:
    """Return the records of an agent that was killed less than `RECORD_SECONDS` ago."""
    return {place for place in folder.glob(f"{_PREFIX}*") if place.stat().st_mtime > time.time() - RECORD_SECONDS}


def age(checkpoint: wire.Checkpoint) -> tuple[int, int]:
    """Return a key by which checkpoints are sorted, newest first."""
    return -checkpoint.fit, -checkpoint.step
