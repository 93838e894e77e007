"""Connections that have not proven the token: their number and duration are limited.

Any process that can reach the port can open connections, send half a request and wait. Such connections are closed
after `PROOF_SECONDS`, and the oldest of them earlier if there are too many for the descriptors that this process may
open. Connections with a proof (agents, daemons, commands) are left alone.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import time
import weakref
from collections.abc import Callable
from typing import Any, Final

from aiohttp import web

from unicron_lightning.detection.silence import Lateness

logger = logging.getLogger(__name__)

PROOF_SECONDS: Final = 5.0
FEW_DESCRIPTORS: Final = 4096
"""Limit of open files below which the coordinator logs for how many agents it suffices."""
OWN_DESCRIPTORS: Final = 32
"""Files and sockets of the process itself."""
LOOK_SECONDS: Final = 0.25
LOG_SECONDS: Final = 1.0
_OUT_OF: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def raise_descriptor_limit() -> int:
    """Raise this process's soft limit of open files to the hard one; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        return soft
    return hard


def agents_within(limit: int) -> int:
    """Return how many agents and daemons the limit of descriptors suffices for: a quarter is kept for others."""
    return max(0, limit - most_unproven(limit) - OWN_DESCRIPTORS)


def most_unproven(limit: int) -> int:
    """Return how many connections without a proof may stay.

    Args:
        limit: of the descriptors that this process may open.
    """
    return max(16, limit // 4)


def excess(ages: dict[Any, float], now: float, most: int) -> list[Any]:
    """Select connections without a proof that have to be closed.

    Args:
        ages: time at which each was first seen, oldest first.
        now: the present time of the same clock.
        most: number of connections that may stay.
    """
    late = [each for each, seen in ages.items() if now - seen > PROOF_SECONDS]
    rest = [each for each, seen in ages.items() if now - seen <= PROOF_SECONDS]
    return late + rest[: max(0, len(rest) - most)]


class UnprovenConnections:
    """Limits unproven connections of one server, in its event loop.

    Args:
        runner: the server's runner, set up.
        proven: transports of connections that have proven the token.
        clock: time.monotonic(), or a stand-in.
    """

    def __init__(
        self, runner: web.AppRunner, proven: weakref.WeakSet[Any], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._runner = runner
        self._proven = proven
        self._seen: dict[Any, float] = {}
        self._known: set[Any] = set()
        """Connections found to be proven: ten thousand are there, and few are new."""
        self._timer: asyncio.TimerHandle | None = None
        self._lateness = Lateness(LOOK_SECONDS, clock())
        self._told = 0.0
        self._silenced = 0

    def start(self) -> None:
        """Start watching; log at most once a second that descriptors are exhausted."""
        limit = raise_descriptor_limit()
        if limit < FEW_DESCRIPTORS:
            logger.warning(
                "descriptors_few limit=%d: enough for about %d agents and daemons; raise the hard limit of open files "
                "(ulimit -Hn, LimitNOFILE) if there will be more",
                limit,
                agents_within(limit),
            )
        asyncio.get_running_loop().set_exception_handler(self._log)
        self._lateness = Lateness(LOOK_SECONDS, self._clock())
        self.look()

    def close(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()

    def look(self) -> None:
        """Close connections without a proof that are there for too long, or are too many; again soon."""
        if self._timer is not None:
            self._timer.cancel()
        server = self._runner.server
        now = self._clock()
        late = self._lateness.fired(now)  # time in which no request could be answered is not counted
        self._seen = {each: min(now, seen + late) for each, seen in self._seen.items()}
        there = server.connections if server is not None else []
        self._known.intersection_update(there)
        unknown = [each for each in there if each not in self._known]
        self._known.update(each for each in unknown if each.transport in self._proven)
        self._seen = {each: self._seen.get(each, now) for each in unknown if each not in self._known}
        # The limit can be changed from outside while this process runs.
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        for handler in excess(self._seen, now, most_unproven(soft)):
            handler.force_close()
            del self._seen[handler]
        self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self.look)

    def _log(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in _OUT_OF):
            loop.default_exception_handler(context)
            return
        now = time.monotonic()
        if now - self._told < LOG_SECONDS:
            self._silenced += 1
            return
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        logger.error("descriptors_exhausted limit=%d error=%s more=%d", limit, error, self._silenced)
        self._told, self._silenced = now, 0
