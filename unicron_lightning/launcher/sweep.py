"""Submits the jobs of a sweep to a coordinator and waits for their ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from unicron_lightning.cli.client import fetch, quoted
from unicron_lightning.errors import CoordinatorUnavailable, UnicronError
from unicron_lightning.jobs import Job

logger = logging.getLogger(__name__)

_OPEN: Final = ("queued", "running")


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a job ended.

    Attributes:
        state: succeeded, failed, cancelled, or lost: the coordinator does not know it any more.
        reason: in words; None if there is none.
    """

    state: str
    reason: str | None


class Sweep:
    """The jobs of one sweep.

    Args:
        ask: `fetch` with endpoint and token.
        poll_seconds: how often the coordinator is asked.
        unavailable_seconds: how long it may be away.
    """

    def __init__(self, ask: Callable[..., Any], *, poll_seconds: float, unavailable_seconds: float) -> None:
        self._ask = ask
        self._poll_seconds = poll_seconds
        self._unavailable_seconds = unavailable_seconds
        self._ended: dict[str, Ended] = {}
        self._states: dict[str, str] = {}

    def run(self, jobs: Sequence[Job]) -> list[Ended]:
        """Submit the jobs, and return how they ended, in their order. Whatever ends this early cancels them.

        Raises:
            CoordinatorUnavailable: it was away for too long.
            UnicronError: it refuses a job.
        """
        try:
            for job in jobs:
                self._ask("/v1/jobs", method="POST", body=msgspec.to_builtins(job, str_keys=True))
                self._states[job.name] = "queued"
            self._wait()
        except BaseException:
            self._cancel()
            raise
        return [self._ended[job.name] for job in jobs]

    def _wait(self) -> None:
        seen = time.monotonic()
        while self._states:
            try:
                known = {each["name"]: each for each in self._ask("/v1/jobs")}
                seen = time.monotonic()
                self._review(known)
            except CoordinatorUnavailable as error:
                # The jobs go on without it; so do we, until it is back.
                logger.warning("coordinator_away %s", error)
                if time.monotonic() - seen > self._unavailable_seconds:
                    raise
            if self._states:
                time.sleep(self._poll_seconds)

    def _review(self, known: dict[str, dict[str, Any]]) -> None:
        for name, before in list(self._states.items()):
            status = known.get(name, {"state": "lost", "reason": "the coordinator does not know it any more"})
            state, reason = status["state"], status["reason"]
            if state != before:
                logger.info("job_%s name=%s reason=%s", state, name, reason)
            if state in _OPEN:
                self._states[name] = state
            else:
                del self._states[name]
                self._ended[name] = Ended(state=state, reason=reason)

    def _cancel(self) -> None:
        for name in self._states:
            try:
                self._ask(f"/v1/tasks/{quoted(name)}/cancel", method="POST")
            except UnicronError as error:
                logger.warning("job_not_cancelled name=%s error=%s", name, error)


def asking(endpoint: str, token: str | None) -> Callable[..., Any]:
    """`fetch` for one coordinator."""

    def ask(path: str, **options: Any) -> Any:
        return fetch(endpoint, path, token, **options)

    return ask
