"""Files and folders that only this user may read, this user's folder on this machine, and files at paths of others.

The folder has agents' sockets, slots' locks, coordinators' state and logs. It lies below the folder for temporary files
(TMPDIR, else /tmp), to which all users of the machine can write. Another user may thus have created it beforehand, as a
folder or a symbolic link, and could then read and replace its contents. Therefore its owner and mode, and those of the
folders within it, are checked at each use.

At a path that others choose, a pipe would block its reader for ever, and a device has no end: only regular files are
opened there.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Final

from unicron_lightning import environ
from unicron_lightning.errors import ConfigError

FILE_MODE: Final = 0o600
FOLDER_MODE: Final = 0o700
RECORD: Final = "coordinator.json"
"""File of a state folder in which its coordinator describes itself."""
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
_ELSE: Final = "set TMPDIR to a folder of your own"


def user_path() -> Path:
    """Return the path of this user's folder; nothing is created or checked."""
    return Path(tempfile.gettempdir()) / f"unicron-{os.getuid()}"


def default_state_dir(host: str, port: int) -> Path:
    """Return the folder of the state of a coordinator at this endpoint, unless the user names another one."""
    if given := os.environ.get(environ.STATE_DIR):
        return Path(given).expanduser().absolute()
    return user_path() / f"{host.replace(':', '_')}-{port}"


def make_private(folder: Path) -> Path:
    """Create a folder that only this user can read and write; check it if it exists.

    Args:
        folder: this user's folder, one within it, or one that the user has named, which must only belong to the user.

    Returns:
        The folder.

    Raises:
        ConfigError: the folder belongs to another user, can be written by others, is a symbolic link or no folder, or
            lies where others can replace it.
        OSError: the folder cannot be created.
    """
    home = user_path()
    if folder != home and home not in folder.parents:
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        _check_owner(folder, folder.stat())
        return folder
    _check_parent(home.parent)
    for part in [home, *reversed([p for p in (folder, *folder.parents) if home in p.parents])]:
        try:
            part.mkdir(mode=FOLDER_MODE)
        except FileExistsError:
            _check(part)
    return folder


def open_private(path: str | Path, flags: int) -> int:
    """Open a file, created with mode 0600 if it does not exist; a symlink is not followed.

    An existing file of this user that others may read or write is given mode 0600.

    Args:
        path: the file.
        flags: of ``os.open``; O_CREAT, O_CLOEXEC and O_NOFOLLOW are added.

    Returns:
        A descriptor, closed by the caller. Usable as ``opener`` of ``open``.

    Raises:
        OSError: the file cannot be opened, e.g. because it is a symlink (ELOOP).
    """
    descriptor = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
    try:
        found = os.fstat(descriptor)
        if found.st_uid == os.getuid() and stat.S_ISREG(found.st_mode) and found.st_mode & 0o077:
            os.fchmod(descriptor, FILE_MODE)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check(folder: Path) -> None:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "no folder"
        raise ConfigError(f"{folder} is {kind}: expected a folder of yours with mode 0700; remove it, or {_ELSE}")
    _check_owner(folder, found)
    if found.st_mode & _OTHERS_WRITE:
        mode = stat.S_IMODE(found.st_mode)
        raise ConfigError(f"{folder} has mode {mode:04o}, others can write to it: expected 0700; remove it, or {_ELSE}")
    if stat.S_IMODE(found.st_mode) != FOLDER_MODE:
        folder.chmod(FOLDER_MODE)


def _check_owner(folder: Path, found: os.stat_result) -> None:
    if found.st_uid != os.getuid():
        raise ConfigError(
            f"{folder} belongs to user {found.st_uid}, not to you ({os.getuid()}): choose another folder, or {_ELSE}"
        )


def _check_parent(folder: Path) -> None:
    """Check that other users cannot rename the folder's contents."""
    found = folder.stat()
    if found.st_uid not in (0, os.getuid()):
        raise ConfigError(f"{folder} belongs to user {found.st_uid}: expected root or you; {_ELSE}")
    if found.st_mode & _OTHERS_WRITE and not found.st_mode & stat.S_ISVTX:
        mode = stat.S_IMODE(found.st_mode)
        raise ConfigError(f"{folder} has mode {mode:04o}, any user can replace its contents: expected 1777; or {_ELSE}")


def open_regular(path: str | os.PathLike[str], flags: int) -> int:
    """Open a regular file; usable as ``opener`` of ``open``.

    Args:
        path: the file; symbolic links are followed.
        flags: of ``os.open``; O_CLOEXEC and O_NONBLOCK, which has no effect on a regular file, are added.

    Returns:
        A descriptor, closed by the caller.

    Raises:
        OSError: it cannot be opened, or is a pipe, a device, a socket or a folder.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no regular file", os.fspath(path))
    return descriptor


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: as `open_regular`.
    """
    with open(path, "rb", opener=open_regular) as file:
        return file.read()


def open_stored(path: str | os.PathLike[str]) -> AbstractContextManager[IO[bytes]]:
    """Open a regular file, or what is at a URL for which fsspec has a package, for reading.

    Raises:
        OSError: as `open_regular`.
    """
    if "://" not in str(path):
        return open(path, "rb", opener=open_regular)
    import fsspec  # type: ignore[import-untyped]  # for URLs only

    found: AbstractContextManager[IO[bytes]] = fsspec.open(str(path), "rb")
    return found
