"""Answers from the state folder of a coordinator that has ended, such as an embedded one after its last task."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import socket
import sqlite3
import sys
import time
from pathlib import Path
from typing import Any

from unicron_lightning.cli.client import access_of, fetch
from unicron_lightning.errors import CoordinatorUnavailable

_FILE = "coordinator.sqlite"
_CONNECT_SECONDS = 1.0
_AWAY = "waits for a coordinator: an agent of the task starts one, or `unicron coordinator` does"


def ask(options: argparse.Namespace, path: str, **query: str) -> Any:
    """Query the coordinator; if none listens, read what the last one at this endpoint has stored on this machine.

    A line on stderr says so.

    Args:
        options: of the command line.
        path: /v1/jobs, /v1/events or /v1/incidents.
        query: parameters.

    Raises:
        CoordinatorUnavailable: no coordinator answers, and nothing is stored; or one listens but is not accepted.
    """
    try:
        return fetch(options.endpoint, path, access_of(options), **query)
    except CoordinatorUnavailable:
        answer = stored(options.endpoint, path, **query)
        if answer is None:
            raise
        return answer


def stored(endpoint: str, path: str, **query: str) -> Any:
    """Answer as `ask` does without a coordinator; None if one listens, or nothing is stored."""
    return None if _listens(endpoint) else _read(endpoint, path, query)


def _place(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    return host, int(port) if port.isdecimal() else 0


def _listens(endpoint: str) -> bool:
    try:
        socket.create_connection(_place(endpoint), _CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def _read(endpoint: str, path: str, query: dict[str, str]) -> Any:
    """Answer from the database of this endpoint; None if there is none of this user's that can be read."""
    from unicron_lightning.coordinator.storage.database import default_state_dir

    file = default_state_dir(*_place(endpoint)) / _FILE
    try:
        for each in (file, file.parent):
            if each.is_symlink() or each.stat().st_uid != os.getuid():
                return None
        with contextlib.closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as database:
            answer = _answer(database, path, query)
        _announce(endpoint, file, file.stat().st_mtime)
    except (OSError, sqlite3.Error):
        return None
    return answer


def _answer(database: sqlite3.Connection, path: str, query: dict[str, str]) -> Any:
    from unicron_lightning.coordinator.incidents import accounting
    from unicron_lightning.coordinator.incidents.facts import IncidentClosed
    from unicron_lightning.coordinator.orders.jobs import listed, recent
    from unicron_lightning.coordinator.storage.store import StoredState

    state, task = StoredState(database), query.get("task")
    if path == "/v1/events":
        return state.events(task=task, since=int(query.get("since", "0")))
    cluster, started_at = state.load(), 0.0
    if query.get("current") == "1":
        started_at = max(
            [each["at"] for each in state.events(name="coordinator_started", newest=True, limit=1)] or [0.0]
        )
    if path == "/v1/incidents":
        closed = state.events(task=task, name=IncidentClosed.event)
        return accounting.book(recent(closed, cluster, started_at), cluster, time.time(), only=task)
    assert path == "/v1/jobs"
    found = listed(cluster, started_at)
    return [status if status["ended_at"] is not None else {**status, "reason": _AWAY} for status in found]


def events_of(options: argparse.Namespace, *, since: int = 0, task: str | None) -> list[dict[str, Any]]:
    """Return the whole log after an event, page by page; of one task if it is given."""
    query = {} if task is None else {"task": task}
    found: list[dict[str, Any]] = []
    while (page := ask(options, "/v1/events", since=str(since), **query)) and page[-1]["seq"] > since:
        found += page
        since = page[-1]["seq"]
    return found


@functools.cache
def _announce(endpoint: str, file: Path, saved_at: float) -> None:
    """Say where the answer comes from, once."""
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(saved_at))
    print(f"unicron: no coordinator listens at {endpoint}; its state of {saved}, from {file.parent}:", file=sys.stderr)
