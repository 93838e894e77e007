"""State that outlives the coordinator process: the tasks' states and the event log, in one SQLite database.

Written with a write-ahead log and synchronous=NORMAL: committed data survives the end of the process by any signal. The
last moments may be lost when the machine's power fails, and then the agents' registrations fill the gap.

**A corrupt file** is set aside: it never prevents a coordinator's start. Training loses nothing when state is set
aside: the agents' registrations rebuild it, as after the file was deleted. The event log, drained nodes and the record
of ended tasks, which only the file holds, stay in the renamed file.

**The event log** is bounded in the size of an event and the number of events kept. An event with too many bytes keeps
its small fields; the others are cut and marked. The oldest events are deleted while the log grows, a few with each
write, so that no write takes long.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, TypedDict

import msgspec
from typing_extensions import override

from unicron_lightning.coordinator import state
from unicron_lightning.coordinator.events import Emit
from unicron_lightning.errors import ConfigError, UnicronError
from unicron_lightning.private_files import FILE_MODE, make_private, open_private

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


def _open_database(path: Path) -> tuple[sqlite3.Connection, Path | None]:
    """Open the database; create it if it does not exist.

    Returns:
        The connection, and the new name of a corrupt database that was set aside, or None.

    Raises:
        ConfigError: a newer version of the package wrote the database.
        StoreUnusable: it can be neither opened nor set aside: disk full, no permission, or locked.
    """
    aside: Path | None = None
    try:
        while True:
            database = _open(path)
            try:
                _prepare(database, path)
                return database, aside
            except BaseException as error:
                # After an OperationalError (full disk, missing permission or lock) the file may be intact.
                corrupt = isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError)
                if not corrupt or aside is not None:
                    database.close()
                    raise
                aside = _set_aside(path)  # before closing, which deletes the write-ahead log
                database.close()
                logger.error("store_set_aside path=%s renamed=%s error=%s", path, aside, error)
    except (sqlite3.Error, OSError) as error:
        raise StoreUnusable(
            f"can't use {path}: {error}; expected a folder in which this user can write, on a disk with free space"
        ) from error


def _open(path: Path) -> sqlite3.Connection:
    """Open the file and set its mode, which SQLite copies to its companion files."""
    if not path.exists():
        os.close(open_private(path, os.O_RDWR))
    elif path.is_file():
        path.chmod(FILE_MODE)
    return sqlite3.connect(path, isolation_level=None)


def _prepare(database: sqlite3.Connection, path: Path) -> None:
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=NORMAL")
    (found,) = database.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise sqlite3.DatabaseError(found)
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version > _SCHEMA_VERSION:
        raise ConfigError(f"store.state_dir={path.parent} was written by a newer version (schema {version})")
    create_tables(database)
    database.execute(f"PRAGMA user_version={_SCHEMA_VERSION}")


def create_tables(database: sqlite3.Connection) -> None:
    """Create the tables that do not exist."""
    database.executescript(_SCHEMA)


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


MOST_FIELD_BYTES: Final = 16 << 10
"""Limit of the encoded fields of one event."""
_EVENT_BYTES_KEPT: Final = 64 << 20
"""Limit of the encoded fields of all events."""
PAGE_BYTES: Final = 4 << 20
"""Limit of the encoded fields of one answer's events."""
_MOST_VALUE_BYTES: Final = 1 << 10
_MOST_FIELDS: Final = 8
_AT_ONCE: Final = 2000


def encoded(fields: dict[str, Any]) -> str:
    """Encode the fields of an event as JSON, cut if they are too large."""
    whole = state.encode(fields)
    if len(whole) <= MOST_FIELD_BYTES:
        return whole.decode()
    kept: dict[str, Any] = {name[:100]: _cut(value) for name, value in list(fields.items())[:_MOST_FIELDS]}
    return state.encode({**kept, "cut_from_bytes": len(whole)}).decode()


def _cut(value: Any) -> Any:
    data = state.encode(value)
    if len(data) <= _MOST_VALUE_BYTES:
        return value
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode(errors="replace")
    return f"{text[: _MOST_VALUE_BYTES // 2]}... (cut, {len(data)} bytes)"


class EventLog:
    """Tracks the size of the table of events; deletes the oldest ones beyond the bounds.

    Args:
        database: contains the table.
        number: newest events that are kept.
        size: bytes of their fields that are kept.
    """

    def __init__(self, database: sqlite3.Connection, number: int, size: int = _EVENT_BYTES_KEPT) -> None:
        self._db = database
        self._most, self._most_bytes = number, size
        self.held: tuple[int, int] = (0, 0)
        """Events and bytes in the table; a caller that rolls a transaction back restores it."""
        self.recount()

    def recount(self) -> None:
        """Count the events in the table, after a change by others."""
        found = self._db.execute("SELECT count(*), coalesce(sum(length(fields)), 0) FROM events").fetchone()
        self.held = (found[0], found[1])

    def append(self, at: float, event: Emit) -> None:
        """Append an event, within the caller's transaction."""
        text = encoded(event.fields)
        self._db.execute(
            "INSERT INTO events (at, name, task, incident, fields) VALUES (?, ?, ?, ?, ?)",
            (at, event.name, event.task, event.incident, text),
        )
        number, size = self.held
        self.held = number + 1, size + len(text)

    def prune(self) -> None:
        """Delete some of the oldest events if there are too many, within the caller's transaction."""
        if self._fits():
            return
        last = 0
        for seq, size in self._db.execute("SELECT seq, length(fields) FROM events ORDER BY seq LIMIT ?", (_AT_ONCE,)):
            last, self.held = seq, (self.held[0] - 1, self.held[1] - size)
            if self._fits():
                break
        self._db.execute("DELETE FROM events WHERE seq <= ?", (last,))

    def _fits(self) -> bool:
        number, size = self.held
        return number <= self._most and size <= self._most_bytes


_UNREADABLE: Final = (msgspec.DecodeError, ValueError, RecursionError)
_EVENTS_KEPT = 100_000


class LoggedEvent(TypedDict):
    """An entry of the event log; ``at`` is the coordinator's time.time()."""

    seq: int
    at: float
    name: str
    task: str | None
    incident: str | None
    fields: dict[str, Any]


class StoredState:
    """What a database holds, for reading: the state of a coordinator that has ended.

    Args:
        database: an open connection; not closed here.
    """

    def __init__(self, database: sqlite3.Connection) -> None:
        self._db = database

    def load(self) -> state.Cluster:
        """Load the tasks as last written, without those that cannot be read."""
        names = [row[0] for row in self._db.execute("SELECT id FROM tasks ORDER BY rowid").fetchall()]
        tasks = [task for name in names if (task := self.task(name)) is not None]
        row = self._db.execute("SELECT state FROM lasting").fetchone()
        lasting = state.Lasting()
        if row is not None:
            try:
                lasting = state.decode_lasting(row[0])
            except _UNREADABLE as error:
                self._leave_out("lasting", None, row[0], str(error))
        return state.Cluster(tasks={task.id: task for task in tasks}, lasting=lasting)

    def task(self, task_id: str) -> state.Task | None:
        """Load a task as last written; None if it does not exist or is unreadable."""
        row = self._db.execute("SELECT state FROM tasks WHERE id = ?", (task_id,)).fetchone()
        if row is None:
            return None
        try:
            task = state.decode_task(row[0])
            if task.id != task_id:
                raise ValueError(f"expected task {task_id!r}, got {task.id!r}")
        except _UNREADABLE as error:
            self._leave_out("tasks", task_id, row[0], str(error))
            return None
        return task

    def _leave_out(self, table: str, task_id: str | None, blob: bytes, reason: str) -> None:
        """Handle an unreadable row: a database that is only read is left as it is."""

    def events(
        self,
        *,
        task: str | None = None,
        name: str | None = None,
        incident: str | None = None,
        since: int = 0,
        limit: int = 10_000,
        most_bytes: int = _EVENT_BYTES_KEPT,
        newest: bool = False,
    ) -> list[LoggedEvent]:
        """Return events with a sequence number above ``since``, oldest first; None selects all tasks, names, incidents.

        The result is limited to ``limit`` events, the first ones or the ``newest``, and to about ``most_bytes`` of
        their fields.
        """
        rows = self._db.execute(
            "SELECT seq, at, name, task, incident, fields FROM events WHERE seq > ? AND (? IS NULL OR task = ?)"
            f" AND (? IS NULL OR name = ?) AND (? IS NULL OR incident = ?) ORDER BY seq {'DESC' if newest else ''}"
            " LIMIT ?",
            (since, task, task, name, name, incident, incident, limit),
        )
        found: list[LoggedEvent] = []
        for seq, at, named, of, incident, fields in rows:
            found.append(LoggedEvent(seq=seq, at=at, name=named, task=of, incident=incident, fields=json.loads(fields)))
            most_bytes -= len(fields)
            if most_bytes <= 0:
                break
        return found[::-1] if newest else found


class Database(StoredState):
    """A coordinator's own database: written in transactions, with a bounded event log.

    This is the seam between the coordinator's shell and where its state lasts. A subclass whose writes take time
    overrides `when_durable`, `durable` and `release`.

    Args:
        database: an open connection.
        events_kept: newest events that are kept; older ones are deleted at the start and with later writes.
        event_bytes: bytes of their fields that are kept.

    Attributes:
        corrupt: new name of a corrupt database that was set aside, or None.
        defers: whether `when_durable` calls the function later.
        error: reason why a write has not succeeded yet, if writes are repeated here; None if none waits.
    """

    defers = False

    def __init__(self, database: sqlite3.Connection, events_kept: int, *, event_bytes: int = _EVENT_BYTES_KEPT) -> None:
        super().__init__(database)
        self.corrupt: Path | None = None
        self.error: str | None = None
        newest = "(SELECT max(seq) FROM events)"
        with contextlib.suppress(sqlite3.OperationalError):  # a full disk: the next start deletes them
            self._db.execute(f"DELETE FROM events WHERE seq <= {newest} - ?", (events_kept,))
        self._log = EventLog(self._db, events_kept, event_bytes)

    def watch(self, lost: Callable[[str], None]) -> None:
        """Have a function called, with the reason, if this process may not write any more."""

    def replace(self, write: Callable[[sqlite3.Connection], None]) -> None:
        """Have a function fill the tables, which are empty."""
        write(self._db)
        self._log.recount()
        self._note([name for (name,) in self._db.execute("SELECT id FROM tasks ORDER BY rowid")], lasting=True)

    def _note(self, tasks: Iterable[str], *, lasting: bool) -> None:
        """Note what was written: these tasks, perhaps the lasting state, and the newest events and unreadable rows."""

    def when_durable(self, then: Callable[[], None], *, fenced: bool = True) -> None:
        """Call a function once all that was written so far is durable; never if it does not become so.

        Args:
            then: the function.
            fenced: whether it must not be called either if another coordinator has taken over, with nothing to write.
        """
        then()

    async def durable(self) -> str | None:
        """Wait until all that was written so far is durable; return the reason if it does not become so."""
        return None

    async def release(self) -> None:
        """Close, and let another coordinator take over."""
        self.close()

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    def set_aside(self, task_id: str, reason: str) -> None:
        """Move a stored task to the table ``unreadable``, where it is kept for inspection and not loaded again."""
        row = self._db.execute("SELECT state FROM tasks WHERE id = ?", (task_id,)).fetchone()
        if row is not None:
            self._leave_out("tasks", task_id, row[0], reason)

    @override
    def _leave_out(self, table: str, task_id: str | None, blob: bytes, reason: str) -> None:
        """Set an unreadable row aside."""
        logger.error("state_unreadable table=%s task=%s error=%s", table, task_id, reason)
        self._db.execute("BEGIN IMMEDIATE")
        self._db.execute("INSERT INTO unreadable VALUES (?, ?, ?, ?)", (task_id or table, time.time(), reason, blob))
        if task_id is None:
            self._db.execute("DELETE FROM lasting")
        else:
            self._db.execute("DELETE FROM tasks WHERE id = ?", (task_id,))
        self._log.append(
            time.time(), Emit(name="state_unreadable", task=task_id, incident=None, fields={"error": reason})
        )
        self._db.execute("COMMIT")
        self._note([] if task_id is None else [task_id], lasting=task_id is None)

    def write(
        self,
        *,
        save: Iterable[state.Task],
        forget: Iterable[str],
        events: Iterable[tuple[float, Emit]],
        lasting: state.Lasting | None = None,
    ) -> None:
        """Write everything in one transaction; ``lasting`` replaces the stored value unless it is None.

        ``events`` come with their time.time().

        Raises:
            sqlite3.Error: e.g. the disk is full.
        """
        save, forget, held = list(save), list(forget), self._log.held
        self._db.execute("BEGIN IMMEDIATE")
        try:
            for task in save:
                self._db.execute(
                    "INSERT INTO tasks VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET state = excluded.state",
                    (task.id, state.encode(task)),
                )
            for task_id in forget:
                self._db.execute("DELETE FROM tasks WHERE id = ?", (task_id,))
            if lasting is not None:
                self._db.execute(
                    "INSERT INTO lasting VALUES (1, ?) ON CONFLICT (only) DO UPDATE SET state = excluded.state",
                    (state.encode(lasting),),
                )
            for at, event in events:
                self._log.append(at, event)
            self._log.prune()
            self._db.execute("COMMIT")
        except sqlite3.Error:
            self._log.held = held
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        self._note((*(task.id for task in save), *forget), lasting=lasting is not None)


class Store(Database):
    """The database in ``state_dir``, held by one process at a time.

    Args:
        state_dir: folder of the database.
        events_kept: newest events that are kept.

    Raises:
        ConfigError: another coordinator holds the directory, or a newer version wrote it.
        StoreUnusable: the directory or the database cannot be used, e.g. the disk is full.
    """

    def __init__(self, state_dir: Path, *, events_kept: int = _EVENTS_KEPT) -> None:
        self._lock = _lock(state_dir)
        try:
            database, corrupt = _open_database(state_dir / "coordinator.sqlite")
        except BaseException:
            os.close(self._lock)
            raise
        super().__init__(database, events_kept)
        self.corrupt = corrupt

    @override
    def close(self) -> None:
        """Close the database and release the directory."""
        super().close()
        os.close(self._lock)


def _lock(state_dir: Path) -> int:
    try:
        lock = open_private(state_dir / "lock", os.O_RDWR)
    except OSError as error:
        raise StoreUnusable(f"can't use store.state_dir={state_dir}: {error.strerror or error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise ConfigError(f"store.state_dir={state_dir} is in use by another coordinator") from error
    return lock
