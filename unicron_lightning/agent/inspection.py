"""Takes down what a worker that hangs was doing, at the coordinator's order, and reports it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from unicron_lightning import wire
from unicron_lightning.agent.supervisor import Supervisor
from unicron_lightning.stacks import capture

logger = logging.getLogger(__name__)


_SAMPLE_SECONDS: Final = 0.5
"""Some time slices of a machine on which ten processes want each CPU."""


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
        if order.if_it_runs and (not stacks or await waits_for_cpu(process.pid)):
            return  # a machine that is too busy to let it answer is no hang
        if self._supervisor.find(order.worker) is None:
            return  # its end is told already
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


async def waits_for_cpu(pid: int) -> bool:
    """Whether a process's main thread, of late, has waited for a CPU for longer than it has had one."""
    before = _ran_and_waited(pid)
    await asyncio.sleep(_SAMPLE_SECONDS)
    after = _ran_and_waited(pid)
    return before is not None and after is not None and after[1] - before[1] > after[0] - before[0]


def _ran_and_waited(pid: int) -> tuple[int, int] | None:
    """Of the main thread, in ns; None if the kernel does not tell."""
    try:
        ran, waited, _ = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()
    except (OSError, ValueError):
        return None
    return int(ran), int(waited)
