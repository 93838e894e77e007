"""The daemon of a node: starts and stops torchrun agents to match the coordinator's orders.

One thread, an asyncio loop. While the coordinator is away the last orders stay in force; a daemon that is asked to end
stops its agents first.

The connection to the coordinator is reopened whenever it breaks. Delays double from 50 ms to 2 s. Nothing is queued
while the coordinator is away: the first message of each connection has the whole state.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import aiohttp
import msgspec

from unicron_lightning import wire
from unicron_lightning.agent.options import LeaveNotices
from unicron_lightning.errors import CoordinatorUnproven, SessionRefused
from unicron_lightning.link import (
    ATTEMPT_SECONDS,
    FIRST_RETRY_SECONDS,
    SESSION,
    end_tasks,
    longest_retry,
    open_socket,
    retry_delay,
)
from unicron_lightning.node.options import NodeOptions, remember_logs
from unicron_lightning.node.process import AgentProcess
from unicron_lightning.node.reconcile import AgentKey, key_of, steps
from unicron_lightning.tls import Access
from unicron_lightning.wire.daemon import Launch, NodeHello, NodeReport, NodeRun, NodeTask, decode_to_node

logger = logging.getLogger(__name__)


class NodeLink:
    """Session of one daemon.

    Args:
        url: ``http://host:port/v1/node``.
        access: to the coordinator.
        hello: builds the first message of a connection.
        received: called with each message of the coordinator.
    """

    def __init__(
        self, url: str, access: Access, hello: Callable[[], NodeHello], received: Callable[[NodeRun], None]
    ) -> None:
        self._url = url
        self._access = access
        self._hello = hello
        self._received = received
        self._unsent: asyncio.Queue[NodeReport] = asyncio.Queue()
        self._stands = False
        self._away_told = False

    def tell(self, report: NodeReport) -> None:
        """Send a report if there is a connection; otherwise the next one's first message includes it."""
        if self._stands:
            self._unsent.put_nowait(report)

    async def run(self) -> None:
        """Keep the session up until cancelled.

        Raises:
            SessionRefused: the coordinator refuses this daemon.
        """
        retry = FIRST_RETRY_SECONDS
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=ATTEMPT_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            while True:
                try:
                    await self._one_connection(http)
                    retry = FIRST_RETRY_SECONDS
                except (aiohttp.ClientError, OSError, asyncio.TimeoutError, CoordinatorUnproven) as error:
                    if not self._away_told:
                        self._away_told = True
                        logger.warning("coordinator_not_reached url=%s error=%s; retrying", self._url, error)
                self._stands = False
                await asyncio.sleep(retry_delay(retry))
                retry = min(2 * retry, longest_retry(self._url))

    async def _one_connection(self, http: aiohttp.ClientSession) -> None:
        async with await open_socket(http, self._url, self._access, **SESSION) as socket:
            self._unsent = asyncio.Queue()
            self._stands, self._away_told = True, False
            await socket.send_str(wire.encode(self._hello()).decode())
            logger.info("session_stands url=%s", self._url)
            writer = asyncio.create_task(self._write(socket))
            try:
                async for frame in socket:
                    self._take(frame)
            finally:
                await end_tasks([writer])

    async def _write(self, socket: aiohttp.ClientWebSocketResponse[Any]) -> None:
        while True:
            await socket.send_str(wire.encode(await self._unsent.get()).decode())

    def _take(self, frame: Any) -> None:
        if frame.type is not aiohttp.WSMsgType.TEXT:
            return
        try:
            message = decode_to_node(frame.data)
        except msgspec.DecodeError as error:
            logger.error("coordinator_message_unreadable error=%s", error)
            return
        if isinstance(message, wire.Refused):
            raise SessionRefused(f"the coordinator refuses this daemon: {message.reason}")
        self._received(message)


_PATIENCE_SECONDS: Final = 15.0
"""torchrun learns of its task's end itself; workers of plain scripts may then take their ``stop_timeout`` of 10 s."""


class Daemon:
    """One daemon.

    Args:
        options: the user's options.
    """

    def __init__(self, options: NodeOptions) -> None:
        self._options = options
        self._started_at = time.time()
        self._wanted: Sequence[Launch] = ()
        self._agents: dict[AgentKey, AgentProcess] = {}
        self._wake: asyncio.TimerHandle | None = None
        self._ending = asyncio.Event()
        self._changed = asyncio.Event()
        self._told: list[NodeTask] = []
        self._link = NodeLink(options.url, options.access, self._hello, self._run)

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then stop all agents; a second signal kills them.

        Raises:
            SessionRefused: the coordinator refuses this daemon; its agents are stopped.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked_to_end)
        notices = LeaveNotices(self._options.leave_signal, self._options.notice_file)
        slots = [slot.label for slot in self._options.slots]
        remember_logs(self._options.logs)
        logger.info("daemon_started node=%s slots=%s logs=%s", self._options.node, slots, self._options.logs)
        link = asyncio.create_task(self._link.run())
        ending = asyncio.create_task(self._ending.wait())
        try:
            await asyncio.wait({link, ending}, return_when=asyncio.FIRST_COMPLETED)
            if link.done():
                link.result()
        finally:
            notices.close()
            for task in (link, ending):
                task.cancel()
            await asyncio.gather(link, ending, return_exceptions=True)
            await self._stop_all()
            logger.info("daemon_ended node=%s", self._options.node)

    def _asked_to_end(self) -> None:
        if self._ending.is_set():
            for agent in self._agents.values():
                agent.kill()
        self._ending.set()

    async def _stop_all(self) -> None:
        self._ending.set()  # from now on a signal kills
        self._wanted = ()
        for agent in self._agents.values():
            agent.stop(patience_seconds=0.0)
        self._review()
        while self._agents:
            self._changed.clear()
            await self._changed.wait()

    def _hello(self) -> NodeHello:
        self._told = self._tasks()
        return NodeHello(
            protocol=wire.PROTOCOL_VERSION,
            node=self._options.node,
            host=socket.gethostname(),
            pid=os.getpid(),
            started_at=self._started_at,
            slots=[slot.label for slot in self._options.slots],
            tasks=self._told,
            kind=self._options.kind,
        )

    def _run(self, message: NodeRun) -> None:
        self._wanted = message.launches
        self._review()

    def _review(self) -> None:
        """Carry out the steps that are due now, and report changes."""
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        due = steps(self._wanted, {key: agent.state for key, agent in self._agents.items()}, time.monotonic())
        for key in due.forget:
            del self._agents[key]
        for key in due.stop:
            self._agents[key].stop(_PATIENCE_SECONDS)
        for launch in due.start:
            self._agent(launch).start()
        loop = asyncio.get_running_loop()
        if due.wake_at is not None:
            self._wake = loop.call_later(max(0.0, due.wake_at - time.monotonic()), self._review)
        self._changed.set()
        tasks = self._tasks()
        if tasks != self._told:
            self._told = tasks
            self._link.tell(NodeReport(tasks=tasks))

    def _agent(self, launch: Launch) -> AgentProcess:
        key = key_of(launch)
        if key not in self._agents:
            # deferred: an agent that can't be started ends within its start
            self._agents[key] = AgentProcess(launch, self._options, self._review_soon)
        return self._agents[key]

    def _review_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self._review)

    def _tasks(self) -> list[NodeTask]:
        return [agent.report for agent in self._agents.values()]


def serve(options: NodeOptions) -> int:
    """Run a daemon to its end; return the exit status of the process."""

    async def main() -> None:
        await Daemon(options).run()

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        asyncio.run(main())
    except SessionRefused as error:
        logger.error("%s", error)
        return 2
    return 0
