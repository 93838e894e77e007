"""The token that coordinator, agents, daemons and commands share, and its sources.

The token is read from a file that the user names, else from the variable ``UNICRON_TOKEN``, else from the user's own
file. The user's file is created when it is first needed for a coordinator on a loopback address, so that no link is
ever without a token. For other addresses it is used if it exists and never created: tokens created on several hosts
would differ.

The user's file is ``unicron/token`` below ``$XDG_STATE_HOME`` (default ``~/.local/state``). Folder and file must belong
to this user and be inaccessible to all others; a symbolic link in place of either is refused.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from unicron_lightning import environ
from unicron_lightning.errors import ConfigError

_BYTES: Final = 32
_NAME: Final = "token"
_MOST_BYTES: Final = 4096
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
_ELSE: Final = f"or set {environ.TOKEN}"


@dataclass(frozen=True, kw_only=True)
class Token:
    """A shared secret.

    Attributes:
        secret: the token itself; never shown.
        origin: its source, for messages.
    """

    secret: str = field(repr=False)
    origin: str


def is_loopback(host: str) -> bool:
    """Whether ``host`` is written as an address that only this machine can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def user_file() -> Path:
    """Return the path of the user's own token file, whether it exists or not."""
    given = os.environ.get("XDG_STATE_HOME", "")
    home = Path(given) if given.startswith("/") else Path.home() / ".local" / "state"
    return home / "unicron" / _NAME


def find_token(token_file: str | None, *, make: bool, option: str = "token_file=") -> Token | None:
    """Find the token.

    Args:
        token_file: the file that the user has named, if any.
        make: whether to create the user's own file if no token exists.
        option: name of the user's option for the file, for messages.

    Returns:
        The token; None if none exists and none may be created.

    Raises:
        ConfigError: a file cannot be read, is empty, or can be read or replaced by others.
    """
    if token_file is not None:
        return _named(token_file, option)
    given = os.environ.get(environ.TOKEN)
    if given:
        return Token(secret=given, origin=environ.TOKEN)
    path = user_file()
    try:
        with _folder(path.parent, make=make) as folder:
            found = _read(path, folder)
            if found is None and make:
                _make(folder)
                found = _read(path, folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"the token file {path}: {error.strerror or error}; correct this, {_ELSE}") from error
    return None if found is None else Token(secret=found, origin=str(path))


def token_for(host: str, token_file: str | None, *, option: str = "token_file=") -> Token:
    """Find the token for a coordinator at ``host``; create it if necessary for a loopback address.

    Raises:
        ConfigError: no token exists, or a file is invalid.
    """
    token = find_token(token_file, make=is_loopback(host), option=option)
    if token is None:
        raise ConfigError(
            f"no token for the coordinator at {host}, which is not a loopback address: set {environ.TOKEN} or "
            f"{option}PATH, or copy the coordinator's token file to {user_file()}; it must be the same on all hosts"
        )
    return token


def _named(token_file: str, option: str) -> Token:
    try:
        token = Path(token_file).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option}{token_file}: {getattr(error, 'strerror', None) or error}") from error
    if not token:
        raise ConfigError(f"{option}{token_file} is empty: expected a token in it")
    return Token(secret=token, origin=token_file)


@contextmanager
def _folder(path: Path, *, make: bool) -> Iterator[int]:
    """Open the folder and check that only this user can access it."""
    if make:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check(path, os.fstat(folder), "0700")
        yield folder
    finally:
        os.close(folder)


def _check(path: Path, found: os.stat_result, mode: str) -> None:
    if found.st_uid != os.geteuid():
        raise ConfigError(f"{path} belongs to user {found.st_uid}, not to you ({os.geteuid()}): remove it, {_ELSE}")
    if found.st_mode & _OTHERS:
        now = f"{stat.S_IMODE(found.st_mode):04o}"
        raise ConfigError(f"{path} has mode {now}, open to other users: expected {mode} (chmod), {_ELSE}")


def _read(path: Path, folder: int) -> str | None:
    """Return the token in the folder's file; None if the file does not exist."""
    try:
        # O_NONBLOCK avoids blocking on a FIFO in its place.
        descriptor = os.open(_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{path} is no regular file: remove it, {_ELSE}")
        _check(path, found, "0600")
        token = file.read(_MOST_BYTES).decode("ascii", "replace").strip()
    if not token:
        raise ConfigError(f"{path} is empty: expected a token in it; remove it to create a new one, {_ELSE}")
    return token


def _make(folder: int) -> None:
    """Create the file with a new token, unless another process is faster; it is never visible half written."""
    partial = f"{_NAME}.{secrets.token_hex(8)}"
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(_BYTES) + "\n")
            file.flush()
            os.fsync(descriptor)
        with contextlib.suppress(FileExistsError):
            os.link(partial, _NAME, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    finally:
        os.unlink(partial, dir_fd=folder)
