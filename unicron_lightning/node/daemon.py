"""The daemon of a node: starts and stops torchrun agents to match the coordinator's orders.

One thread, an asyncio loop. While the coordinator is away the last orders stay in force; a daemon that is asked to end
stops its agents first.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Sequence
from typing import Final

from unicron_lightning import wire
from unicron_lightning.agent.notices import LeaveNotices
from unicron_lightning.errors import SessionRefused
from unicron_lightning.node.link import NodeLink
from unicron_lightning.node.options import NodeOptions, remember_logs
from unicron_lightning.node.process import AgentProcess
from unicron_lightning.node.reconcile import AgentKey, key_of, steps
from unicron_lightning.wire.daemon import Launch, NodeHello, NodeReport, NodeRun, NodeTask

logger = logging.getLogger(__name__)

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
        self._link = NodeLink(
            options.url, options.token, self._hello, self._run, forwarded=options.forwarded, trust=options.trust
        )

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
