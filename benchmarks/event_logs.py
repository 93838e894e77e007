"""Reads the events that a run's workers write to ``worker_*.jsonl``, one JSON line each."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class EventReader:
    """The events of a folder, as they are written.

    Args:
        folder: of the files.

    Attributes:
        events: all that were read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[Event] = []
        self._read: dict[Path, int] = {}

    def poll(self) -> list[Event]:
        """Read the new events since the last call."""
        new: list[Event] = []
        for path in self.folder.glob("worker_*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            end = data.rfind(b"\n") + 1
            self._read[path] = self._read.get(path, 0) + end
            new += [json.loads(line) for line in data[:end].splitlines()]
        new.sort(key=lambda event: event["t"])
        self.events += new
        return new


def wait_event(poll: Callable[[], list[Event]], wanted: Callable[[Event], bool], seconds: float, *, told: str) -> Event:
    """Wait for the first new event that ``wanted`` accepts.

    Args:
        poll: returns new events.
        wanted: see above.
        seconds: time limit.
        told: end of the error's message.

    Raises:
        TimeoutError: no such event came in time.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for event in poll():
            if wanted(event):
                return event
        time.sleep(0.002)
    raise TimeoutError(f"nothing for {seconds:g} s; {told}")
