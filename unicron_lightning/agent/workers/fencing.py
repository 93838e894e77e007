"""Workers that the coordinator has declared dead: when they are killed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

from unicron_lightning.agent.workers.roster import ENDING_SECONDS, Roster
from unicron_lightning.worker.siblings import HOOKS_SECONDS

SIBLING_SECONDS: Final = 1.0
"""Seconds for the siblings of a worker that ends by an error to report the same error. It needs as long to exit."""


class Later(Protocol):
    """Calls a function after some seconds, as `asyncio.AbstractEventLoop.call_later`."""

    def __call__(self, delay: float, callback: Callable[..., object], *args: Any) -> object: ...


class Fencing:
    """Kills fenced workers. One that ends by an error of its own may first run its callbacks, such as checkpoints.

    Args:
        roster: the agent's workers.
        later: calls a function after some seconds.
        kill: sends a worker SIGKILL, if it lives.
    """

    def __init__(self, roster: Roster, later: Later, kill: Callable[[str], None]) -> None:
        self._roster = roster
        self._later = later
        self._kill = kill
        self._fenced: set[str] = set()

    def __contains__(self, worker: object) -> bool:
        return worker in self._fenced

    def begin_round(self) -> None:
        """Forget the workers of the round before."""
        self._fenced.clear()

    def fence(self, worker: str) -> None:
        """Kill a worker, also if it is found later. A sibling of one that ends by an error gets `SIBLING_SECONDS`."""
        self._fenced.add(worker)
        if self._roster.any_ends:
            self._later(SIBLING_SECONDS, self._kill_unless_it_ends, worker)
        else:
            self._kill(worker)

    def found(self, worker: str) -> None:
        """Kill a worker whose process was found after it was fenced."""
        if worker in self._fenced:
            self._kill(worker)

    def heard(self, worker: str) -> None:
        """Limit the time of a worker that ends by an error: for its trainer's hooks, and for its exit after them."""
        if self._roster.ends(worker):
            seconds = HOOKS_SECONDS if self._roster.runs_error_hooks(worker) else ENDING_SECONDS
            self._later(seconds, self._kill, worker)

    def _kill_unless_it_ends(self, worker: str) -> None:
        if not self._roster.ends(worker):
            self._kill(worker)
