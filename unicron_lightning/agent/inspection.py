"""Takes down what a worker that hangs was doing, at the coordinator's order, and reports it.

A worker that does not answer is looked at twice before anything is said of it: when it is asked, and when the order
comes. `frozen` judges.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from unicron_lightning import wire
from unicron_lightning.agent.supervisor import Supervisor, WatchedProcess
from unicron_lightning.detection.frozen import COLLECTING, WORDS, Look, ThreadTimes, frozen
from unicron_lightning.stacks import capture

logger = logging.getLogger(__name__)

WINDOW_SECONDS: Final = 0.15
"""Least time between the two looks: some time slices of a busy machine."""


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
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._looks: dict[str, Look] = {}
        """By worker that was asked and has not answered yet: the first look at it."""

    def begin(self, order: wire.Inspect) -> None:
        """Take down the stacks of a worker; nothing if it has ended, or if that is being done."""
        if order.worker in self._tasks:
            return
        task = asyncio.get_running_loop().create_task(self._inspect(order))
        self._tasks[order.worker] = task
        task.add_done_callback(lambda _: self._tasks.pop(order.worker, None))

    def asked(self, workers: Iterable[str]) -> None:
        """The workers are asked what they do: those that do not answer will have to be judged."""
        known = [(worker, self._supervisor.find(worker)) for worker in workers]
        self._looks = {
            worker: self._looks.get(worker) or look(process.pid) for worker, process in known if process is not None
        }

    def heard(self, worker: str) -> None:
        """The worker says something: it is not silent."""
        self._looks.pop(worker, None)

    def close(self) -> None:
        """No more."""
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
            return  # its end is told already
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
        """Judge a worker that does not answer: cause and stacks; None if it is no hang, as far as can be seen."""
        before = self._looks.get(order.worker)
        if before is None:
            return None  # it has said something since
        await asyncio.sleep(max(0.0, before.at + WINDOW_SECONDS - time.monotonic()))
        after = look(process.pid)
        why = frozen(before, after)
        if self._looks.get(order.worker) is not before:
            return None
        self._looks[order.worker] = after
        if why is None or (why == "computes" and not order.patient):
            return None
        stacks = "" if why == "stopped" else await capture(self._folder, process.pid, process.pidfd)
        if why != "stopped" and (not stacks or COLLECTING in stacks):
            return None
        return f"{order.cause}; {WORDS[why]}", stacks


def look(pid: int) -> Look:
    """Read what the kernel tells of a process's threads; of one that is gone, or not told of, there are none."""
    threads = {}
    at = time.monotonic()
    try:
        for folder in Path(f"/proc/{pid}/task").iterdir():
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            ran, waited, _ = (int(field) / 1e9 for field in (folder / "schedstat").read_text().split())
            threads[int(folder.name)] = ThreadTimes(state=state, ran=ran, waited=waited)
    except (OSError, ValueError):  # it ends, or a kernel without it
        threads = {}
    return Look(at=at, main=pid, threads=threads)
