"""``GET /metrics``: observes the machine for `Meters`, samples the event loop's delay, and answers Prometheus.

A defect of the figures must not disturb a recovery: an observation that raises is logged once, and the figures end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from aiohttp import web

from unicron_lightning import __version__
from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.metrics.exposition import encoded, families
from unicron_lightning.coordinator.metrics.meters import Meters

if TYPE_CHECKING:
    from unicron_lightning.coordinator.server.server import Server

logger = logging.getLogger(__name__)

SAMPLE_SECONDS: Final = 0.25


class Scrape:
    """The metrics of one server, in its event loop.

    Args:
        shell: the server.
    """

    def __init__(self, shell: Server) -> None:
        self.meters = Meters()
        self._shell = shell
        self._timer: asyncio.TimerHandle | None = None
        self._broken = False

    def start(self) -> None:
        """Start to sample the event loop's delay."""
        self._sample(asyncio.get_running_loop().time())

    def close(self) -> None:
        """Stop sampling."""
        if self._timer is not None:
            self._timer.cancel()

    def observe(self, event: ev.Input, actions: Iterable[ev.Action], now: float) -> None:
        """Count an input and the machine's answer."""
        if self._broken:
            return
        try:
            self.meters.observe(event, actions, self._shell.machine.cluster, now)
        except Exception:
            # Supervisor boundary, see the module's description.
            logger.exception("metrics_broken")
            self._broken = True

    def wrote(self, seconds: float) -> None:
        """Count a write to the store."""
        self.meters.store_seconds.observe(seconds)

    def goodput(self, task: str) -> float | None:
        """Return the productive share of a task's time; None if unknown."""
        counts = self.meters.tasks.get(task)
        return None if counts is None else counts.time.goodput

    async def get(self, request: web.Request) -> web.Response:
        """Answer a scrape; texts are encoded in another thread, since those of a thousand nodes take 0.1 s."""
        if self._broken:
            return web.json_response({"error": "the metrics have failed, see the coordinator's log"}, status=500)
        shell, cluster = self._shell, self._shell.machine.cluster
        self.meters.review(cluster, shell.now())
        failing = shell.store_error is not None
        found = families(
            self.meters, cluster, version=str(__version__), started_at=shell.started_at, store_failing=failing
        )
        body, content_type = await asyncio.to_thread(encoded, found, request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type, "Cache-Control": "no-store"})

    def _sample(self, due: float) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        self.meters.loop_lag.observe(max(0.0, now - due))
        self._timer = loop.call_at(now + SAMPLE_SECONDS, self._sample, now + SAMPLE_SECONDS)
