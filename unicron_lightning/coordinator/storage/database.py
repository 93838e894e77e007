"""The state directory and its SQLite file. A corrupt file is set aside: it never prevents a coordinator's start.

Training loses nothing when state is set aside: the agents' registrations rebuild it, as after the file was deleted.
The event log, drained nodes and the record of ended tasks, which only the file holds, stay in the renamed file.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from pathlib import Path

from unicron_lightning.errors import ConfigError, UnicronError
from unicron_lightning.private_files import FILE_MODE, make_private, open_private, user_path

logger = logging.getLogger(__name__)

_SCHEMA_VERSION = 2
_SCHEMA = """
CREATE TABLE IF NOT EXISTS tasks (id TEXT PRIMARY KEY, state BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, name TEXT NOT NULL, task TEXT, incident TEXT,
    fields TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS lasting (only INTEGER PRIMARY KEY CHECK (only = 1), state BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS unreadable (id TEXT NOT NULL, at REAL NOT NULL, reason TEXT NOT NULL, state BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS events_of_task ON events (task, seq);
"""
_FILES = ("", "-wal", "-shm", "-journal")


def default_state_dir(host: str, port: int) -> Path:
    """Return the default folder of the state of a coordinator at this endpoint."""
    if os.environ.get("UNICRON_STATE_DIR"):
        return Path(os.environ["UNICRON_STATE_DIR"])
    return user_path() / f"{host}-{port}"


def prepare_state_dir(path: Path) -> None:
    """Create the directory (mode 0700, parents too).

    Raises:
        ConfigError: it cannot be created, or others can write to it or to its parents; see `folders.make_private`.
    """
    try:
        make_private(path)
    except OSError as error:
        raise ConfigError(f"store.state_dir={path}: {error.strerror or error}; expected a folder of yours") from error


class StoreUnusable(UnicronError):
    """The state folder or its database cannot be used, e.g. the disk is full; the message quotes path and reason."""


def open_database(path: Path) -> tuple[sqlite3.Connection, Path | None]:
    """Open the database; create it if it does not exist.

    Returns:
        The connection, and the new name of a corrupt database that was set aside, or None.

    Raises:
        ConfigError: a newer version of the package wrote the database.
        StoreUnusable: it can be neither opened nor set aside: disk full, no permission, or locked.
    """
    try:
        try:
            return _open(path), None
        except _Corrupt as found:
            logger.error("store_set_aside path=%s renamed=%s error=%s", path, found.aside, found)
            return _open(path), found.aside
    except (sqlite3.Error, OSError, _Corrupt) as error:
        raise StoreUnusable(
            f"can't use {path}: {error}; expected a folder in which this user can write, on a disk with free space"
        ) from error


class _Corrupt(Exception):
    """The file was not a valid database and has been renamed."""

    def __init__(self, reason: str, aside: Path) -> None:
        super().__init__(reason)
        self.aside = aside


def _open(path: Path) -> sqlite3.Connection:
    """Open the file and set its mode, which SQLite copies to its companion files."""
    if not path.exists():
        os.close(open_private(path, os.O_RDWR))
    elif path.is_file():
        path.chmod(FILE_MODE)
    database = sqlite3.connect(path, isolation_level=None)
    try:
        _prepare(database, path)
    except sqlite3.OperationalError:
        database.close()
        raise  # full disk, missing permission or lock: the file may be intact
    except sqlite3.DatabaseError as error:
        aside = _set_aside(path)  # before closing, which deletes the write-ahead log
        database.close()
        raise _Corrupt(str(error), aside) from error
    except BaseException:
        database.close()
        raise
    return database


def _prepare(database: sqlite3.Connection, path: Path) -> None:
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=NORMAL")
    (found,) = database.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise sqlite3.DatabaseError(found)
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version > _SCHEMA_VERSION:
        raise ConfigError(f"store.state_dir={path.parent} was written by a newer version (schema {version})")
    database.executescript(_SCHEMA)
    database.execute(f"PRAGMA user_version={_SCHEMA_VERSION}")


def _set_aside(path: Path) -> Path:
    """Rename the database and its companion files; SQLite opens the renamed files together."""
    stem = f"{path.name}.corrupt-{time.strftime('%Y%m%dT%H%M%S')}"
    aside, number = path.with_name(stem), 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{stem}-{number}")
    for suffix in _FILES:
        part = path.with_name(path.name + suffix)
        if part.exists():
            part.replace(aside.with_name(aside.name + suffix))
    return aside
