"""State that outlives the coordinator process: the tasks' states and the event log, in one SQLite database.

Written with a write-ahead log and synchronous=NORMAL: committed data survives the end of the process by any signal. The
last moments may be lost when the machine's power fails, and then the agents' registrations fill the gap.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import sqlite3
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, TypedDict

import msgspec
from typing_extensions import override

from unicron_lightning.coordinator import state
from unicron_lightning.coordinator.events import Emit
from unicron_lightning.coordinator.storage.database import StoreUnusable, open_database
from unicron_lightning.coordinator.storage.event_log import EVENT_BYTES_KEPT, EventLog
from unicron_lightning.errors import ConfigError
from unicron_lightning.private_files import open_private

logger = logging.getLogger(__name__)

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
        most_bytes: int = EVENT_BYTES_KEPT,
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


class Store(StoredState):
    """The database in ``state_dir``, held by one process at a time.

    Args:
        state_dir: folder of the database.
        events_kept: newest events that are kept; older ones are deleted at the start and with later writes.

    Attributes:
        corrupt: new name of a corrupt database that was set aside, or None.

    Raises:
        ConfigError: another coordinator holds the directory, or a newer version wrote it.
        StoreUnusable: the directory or the database cannot be used, e.g. the disk is full.
    """

    def __init__(self, state_dir: Path, *, events_kept: int = _EVENTS_KEPT) -> None:
        self._lock = _lock(state_dir)
        try:
            database, self.corrupt = open_database(state_dir / "coordinator.sqlite")
        except BaseException:
            os.close(self._lock)
            raise
        super().__init__(database)
        newest = "(SELECT max(seq) FROM events)"
        with contextlib.suppress(sqlite3.OperationalError):  # a full disk: the next start deletes them
            self._db.execute(f"DELETE FROM events WHERE seq <= {newest} - ?", (events_kept,))
        self._log = EventLog(self._db, events_kept)

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
        held = self._log.held
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

    def close(self) -> None:
        """Close the database and release the directory."""
        self._db.close()
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
