"""Takes down what a worker that hangs was doing, at the coordinator's order, and reports it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from unicron_lightning import wire
from unicron_lightning.agent.supervisor import Supervisor
from unicron_lightning.stacks import capture

logger = logging.getLogger(__name__)


class Inspector:
    """Lives in the agent's event loop. The worker is killed only when the coordinator, told, has it fenced.

    Args:
        folder: the agent's private one.
        supervisor: knows the workers' processes.
        send: to the coordinator.
    """

    def __init__(self, folder: Path, supervisor: Supervisor, send: Callable[[wire.Message], None]) -> None:
        self._folder = folder
        self._supervisor = supervisor
        self._send = send
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, order: wire.Inspect) -> None:
        """Take down the stacks of a worker; nothing if it has ended."""
        task = asyncio.get_running_loop().create_task(self._inspect(order))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """No more."""
        for task in list(self._tasks):
            task.cancel()

    async def _inspect(self, order: wire.Inspect) -> None:
        process = self._supervisor.find(order.worker)
        if process is None:
            return
        stacks = await capture(self._folder, process.pid, process.pidfd)
        logger.warning("worker_hangs worker=%s cause=%s\n%s", order.worker, order.cause, stacks)
        if self._supervisor.find(order.worker) is None or (order.if_it_runs and not stacks):
            return  # its end is told already, or it cannot run
        report = wire.ErrorReport(
            worker=order.worker,
            kind="task_hang",
            cause=order.cause,
            phase=order.phase,
            step=order.step,
            at=time.time(),
            details={**order.details, "stacks": stacks},
        )
        self._send(report)
