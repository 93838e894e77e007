"""Bounds of the event log: the size of an event and the number of events kept.

An event with too many bytes keeps its small fields; the others are cut and marked. The oldest events are deleted
while the log grows, a few with each write, so that no write takes long.
"""

from __future__ import annotations

import sqlite3
from typing import Any, Final

import msgspec

from unicron_lightning.coordinator import state
from unicron_lightning.coordinator.events import Emit

MOST_FIELD_BYTES: Final = 16 << 10
"""Limit of the encoded fields of one event."""
EVENT_BYTES_KEPT: Final = 64 << 20
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

    def __init__(self, database: sqlite3.Connection, number: int, size: int = EVENT_BYTES_KEPT) -> None:
        self._db = database
        self._most, self._most_bytes = number, size
        found = database.execute("SELECT count(*), coalesce(sum(length(fields)), 0) FROM events").fetchone()
        self.held: tuple[int, int] = (found[0], found[1])
        """Events and bytes in the table; a caller that rolls a transaction back restores it."""

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
