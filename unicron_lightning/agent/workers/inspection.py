"""Records the stacks of a worker that hangs, on the coordinator's order, and reports them.

A worker that does not answer is examined twice before it is judged by `frozen`: when it is asked, and when the order
arrives.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from unicron_lightning import wire
from unicron_lightning.agent.workers.supervisor import Supervisor, WatchedProcess
from unicron_lightning.detection.frozen import COLLECTING, WORDS, Look, ThreadTimes, frozen
from unicron_lightning.stacks import capture

logger = logging.getLogger(__name__)

WINDOW_SECONDS: Final = 0.15
"""Minimum time between the two examinations: some time slices of a busy machine."""


class Inspector:
    """Inspects workers, in the agent's event loop. The coordinator decides, after the report, whether to fence one.

    Args:
        folder: the agent's private folder.
        supervisor: knows the workers' processes.
        send: sends a message to the coordinator.
    """

    def __init__(self, folder: Path, supervisor: Supervisor, send: Callable[[wire.Message], None]) -> None:
        self._folder = folder
        self._supervisor = supervisor
        self._send = send
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._looks: dict[str, Look] = {}
        """First examination of each worker that was asked and has not answered yet."""

    def begin(self, order: wire.Inspect) -> None:
        """Record the stacks of a worker, unless it has ended or an inspection is in progress."""
        if order.worker in self._tasks:
            return
        task = asyncio.get_running_loop().create_task(self._inspect(order))
        self._tasks[order.worker] = task
        task.add_done_callback(lambda _: self._tasks.pop(order.worker, None))

    def asked(self, workers: Iterable[str]) -> None:
        """Examine workers that are asked for their activity: those that do not answer have to be judged."""
        known = [(worker, self._supervisor.find(worker)) for worker in workers]
        self._looks = {
            worker: self._looks.get(worker) or look(process.pid) for worker, process in known if process is not None
        }

    def heard(self, worker: str) -> None:
        """Record that the worker sends messages: it is not silent."""
        self._looks.pop(worker, None)

    def close(self) -> None:
        """Cancel all inspections."""
        for task in list(self._tasks.values()):
            task.cancel()

    async def _inspect(self, order: wire.Inspect) -> None:
        process = self._supervisor.find(order.worker)
        if process is None:
            return
        if order.silent:
            silent = await self._silent(order, process)
            if silent is None:
                return
            cause, stacks = silent
        else:
            cause, stacks = order.cause, await capture(self._folder, process.pid, process.pidfd)
        logger.warning("worker_hangs worker=%s cause=%s\n%s", order.worker, cause, stacks)
        if self._supervisor.find(order.worker) is None:
            return  # its end is reported already
        report = wire.ErrorReport(
            worker=order.worker,
            kind="task_hang",
            cause=cause,
            phase=order.phase,
            step=order.step,
            at=time.time(),
            details={**order.details, "stacks": stacks},
        )
        self._send(report)

    async def _silent(self, order: wire.Inspect, process: WatchedProcess) -> tuple[str, str] | None:
        """Judge a worker that does not answer: return cause and stacks, or None if no hang is evident."""
        before = self._looks.get(order.worker)
        if before is None:
            return None  # it has sent a message since
        await asyncio.sleep(max(0.0, before.at + WINDOW_SECONDS - time.monotonic()))
        after = look(process.pid)
        why = frozen(before, after)
        if self._looks.get(order.worker) is not before:
            return None
        self._looks[order.worker] = after
        if why is None or (why == "computes" and not order.patient) or (why == "holds" and order.gentle):
            return None
        stacks = "" if why == "stopped" else await capture(self._folder, process.pid, process.pidfd)
        if why != "stopped" and (not stacks or COLLECTING in stacks):
            return None
        return f"{order.cause}; {WORDS[why]}", stacks


def look(pid: int) -> Look:
    """Read the kernel's accounts of a process's threads; empty if the process is gone or they are unavailable."""
    threads = {}
    at = time.monotonic()
    try:
        for folder in Path(f"/proc/{pid}/task").iterdir():
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            ran, waited, _ = (int(field) / 1e9 for field in (folder / "schedstat").read_text().split())
            threads[int(folder.name)] = ThreadTimes(state=state, ran=ran, waited=waited)
    except (OSError, ValueError):  # it is ending, or the kernel lacks the file
        threads = {}
    return Look(at=at, main=pid, threads=threads)
