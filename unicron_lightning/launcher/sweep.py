"""Submits the jobs of a sweep to a coordinator and waits for their ends."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from unicron_lightning.cli.client import Access, fetch, quoted
from unicron_lightning.errors import CoordinatorUnavailable, UnicronError
from unicron_lightning.jobs import Job
from unicron_lightning.local_cluster.processes import sigterm_raises

logger = logging.getLogger(__name__)

_OPEN: Final = ("queued", "running")
_PATIENCE_SECONDS: Final = 5.0
"""Time without a running job after which the reason is logged."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The end of a job.

    Attributes:
        state: succeeded, failed, cancelled, or lost: the coordinator no longer knows it.
        reason: as text; None if there is none.
    """

    state: str
    reason: str | None


class Sweep:
    """The jobs of one sweep.

    Args:
        ask: `fetch` with endpoint and access.
        poll_seconds: interval of the queries to the coordinator.
        unavailable_seconds: time that it may be away.
    """

    def __init__(self, ask: Callable[..., Any], *, poll_seconds: float, unavailable_seconds: float) -> None:
        self._ask = ask
        self._poll_seconds = poll_seconds
        self._unavailable_seconds = unavailable_seconds
        self._ended: dict[str, Ended] = {}
        self._states: dict[str, str] = {}
        self._ran_at = time.monotonic()
        """Time at which a job ran last, or the sweep began."""
        self._reasons: set[str] = set()
        """Logged reasons of the jobs that wait now."""

    def run(self, jobs: Sequence[Job]) -> list[Ended]:
        """Submit the jobs, and return their ends, in order. Any interruption cancels them.

        Raises:
            CoordinatorUnavailable: it was away for too long.
            UnicronError: it refuses a job.
        """
        try:
            with sigterm_raises():
                self._submit_and_wait(jobs)
        except BaseException:
            self._cancel()
            raise
        return [self._ended[job.name] for job in jobs]

    def _submit_and_wait(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._ask("/v1/jobs", method="POST", body=msgspec.to_builtins(job, str_keys=True))
            self._states[job.name] = "queued"
        self._wait()

    def _wait(self) -> None:
        away_since: float | None = None
        while self._states:
            try:
                known = {each["name"]: each for each in self._ask("/v1/jobs")}
                away_since = None
                self._review(known)
            except CoordinatorUnavailable as error:
                # The jobs continue without it, and so does the sweep, until it returns.
                if away_since is None:
                    away_since = time.monotonic()
                    logger.warning("coordinator_away %s", error)
                if time.monotonic() - away_since >= self._unavailable_seconds:
                    raise
            if self._states:
                time.sleep(self._poll_seconds)

    def _review(self, known: dict[str, dict[str, Any]]) -> None:
        for name, before in list(self._states.items()):
            status = known.get(name, {"state": "lost", "reason": "the coordinator no longer knows it"})
            state, reason = status["state"], status["reason"]
            if state != before:
                logger.info("job_%s name=%s reason=%s", state, name, reason)
            if state in _OPEN:
                self._states[name] = state
            else:
                del self._states[name]
                self._ended[name] = Ended(state=state, reason=reason)
        if "running" in self._states.values():
            self._ran_at, self._reasons = time.monotonic(), set()
        elif time.monotonic() - self._ran_at >= _PATIENCE_SECONDS:
            self._tell_reasons(known)

    def _tell_reasons(self, known: dict[str, dict[str, Any]]) -> None:
        """Log why no job runs: each reason once."""
        waiting = Counter(str(known[name]["reason"]) for name in self._states if name in known)
        for reason, number in waiting.items():
            if reason not in self._reasons:
                logger.warning("jobs_wait number=%d reason=%s", number, reason)
        self._reasons = set(waiting)

    def _cancel(self) -> None:
        for name in self._states:
            try:
                self._ask(f"/v1/tasks/{quoted(name)}/cancel", method="POST")
            except UnicronError as error:
                logger.warning("job_not_cancelled name=%s error=%s", name, error)


def asking(endpoint: str, access: Access) -> Callable[..., Any]:
    """Bind `fetch` to one coordinator."""

    def ask(path: str, **options: Any) -> Any:
        return fetch(endpoint, path, access, **options)

    return ask
