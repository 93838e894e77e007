"""Evidence about workers: the stacks of one that hangs, a process that does not answer, and the kernel's about a death.

**Stacks** are recorded and reported on the coordinator's order. A worker that does not answer is examined twice before
it is judged: when it is asked, and when the order arrives. The judgement is pure, from two looks at the kernel's
accounts of the threads.

A process whose control thread is silent may be *stopped* (SIGSTOP), may *hold* the interpreter's lock in a call that
sleeps, or may *compute* with the lock held. These are distinguished from a process that is merely slow: a thread of it
waits for a CPU or for a disk, and continues when it gets it.

**Kernel evidence of a death**: counters of the OOM killer, the kernel log, usage of shared memory. Counters are read
when a worker is found and after each death, the log from the agent's start on. An unreadable source, such as the log in
most containers, is no evidence.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from unicron_lightning import wire
from unicron_lightning.agent.workers.supervisor import Exit, Supervisor, WatchedProcess
from unicron_lightning.detection.exits import Memory, counter, group_of, meaning, named_in
from unicron_lightning.stacks import ask, capture

logger = logging.getLogger(__name__)


Frozen = Literal["stopped", "holds", "computes"]
WORDS: Final[Mapping[Frozen, str]] = {
    "stopped": "its process is stopped by a signal",
    "holds": "its threads use no CPU: a call sleeps with the interpreter's lock",
    "computes": "its threads use the CPU: a call computes with the interpreter's lock",
}
_COLLECTING: Final = "Garbage-collecting"
"""A line of `faulthandler`: the process collects garbage, which holds the lock and ends by itself."""
_WANTED: Final = 0.5
"""Share of the time from which a thread counts as demanding a CPU."""
_IDLE: Final = 0.25
"""CPUs used, below which a process counts as idle: threads that wait for the lock wake two hundred times a second."""


@dataclass(frozen=True, kw_only=True)
class ThreadTimes:
    """The kernel's account of a thread.

    Attributes:
        state: one letter: R runs or could run, S sleeps, D waits for a disk, T is stopped, t is traced.
        ran: seconds on a CPU since it started.
        waited: seconds in which it could have run and had no CPU.
    """

    state: str
    ran: float
    waited: float


@dataclass(frozen=True, kw_only=True)
class Look:
    """One look at a process.

    Attributes:
        at: seconds of a monotonic clock.
        main: identity of its main thread.
        threads: by identity.
    """

    at: float
    main: int
    threads: Mapping[int, ThreadTimes]


def frozen(before: Look, after: Look) -> Frozen | None:
    """Return why a process did not answer between two looks; None if it may only be slow, or is undecidable."""
    seconds = after.at - before.at
    pairs = [(before.threads[each], now) for each, now in after.threads.items() if each in before.threads]
    first, last = before.threads.get(after.main), after.threads.get(after.main)
    if seconds <= 0 or first is None or last is None:
        return None
    if first.state == last.state == "T":
        return "stopped"
    if (
        first.state not in "RSD"
        or last.state not in "RS"
        or any(_is_starved(then, now, seconds) for then, now in pairs)
    ):
        return None
    ran = sum(now.ran - then.ran for then, now in pairs)
    return "holds" if ran <= _IDLE * seconds else "computes"


def _is_starved(then: ThreadTimes, now: ThreadTimes, seconds: float) -> bool:
    """Whether the thread has been waiting for a disk or for a CPU."""
    if then.state == now.state == "D":
        return True
    ran, waited = now.ran - then.ran, now.waited - then.waited
    if then.state == now.state == "R" and ran < _WANTED * seconds:
        return True  # the kernel does not count a wait in progress yet
    return waited > ran and ran + waited > _WANTED * seconds


_LOG: Final = "/dev/kmsg"
_RECORD_BYTES: Final = 8192
_RECORDS: Final = 2000


class Deaths:
    """Evidence on the deaths of one agent's workers.

    Args:
        root: folder with ``proc``, ``sys/fs/cgroup`` and ``dev``; replaced in tests.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._counters: list[tuple[Path, str]] = []
        self._before = Memory()
        self._log: int | None = None
        with contextlib.suppress(OSError):
            self._log = os.open(root / _LOG.lstrip("/"), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._log, 0, os.SEEK_END)

    def close(self) -> None:
        """Close the log."""
        if self._log is not None:
            os.close(self._log)
            self._log = None

    def found(self, pid: int) -> None:
        """Handle a new worker: record the paths and values of its counters."""
        with contextlib.suppress(OSError, ValueError):
            groups = group_of((self._root / f"proc/{pid}/cgroup").read_text())
            mount = self._root / "sys/fs/cgroup"
            self._counters = [
                (folder / name, "oom_kill")
                for key, path in groups.items()
                for base in ([mount / "memory"] if key else [mount, mount / "unified"])
                # In a container the path may be the host's, while the mount shows the group itself.
                for folder in (base / path.lstrip("/"), base)
                for name in (("memory.oom_control",) if key else ("memory.events",))
            ]
        self._before = self.now()

    def now(self) -> Memory:
        """Return the present evidence."""
        found = (counter(text, name) for path, name in self._counters if (text := _read(path)) is not None)
        machine = _read(self._root / "proc/vmstat")
        percent = None
        with contextlib.suppress(OSError, ZeroDivisionError):
            shared = os.statvfs(self._root / "dev/shm")
            percent = 100 * (1 - shared.f_bavail / shared.f_blocks)
        return Memory(
            group_kills=next((each for each in found if each is not None), None),
            machine_kills=None if machine is None else counter(machine, "oom_kill"),
            shared_percent=percent,
        )

    def tell(self, worker: str, how: Exit, output: tuple[str, ...] = ()) -> wire.WorkerDied:
        """Build the report of a worker's death, with the last lines of its output."""
        before, self._before = self._before, self.now()
        named = how.pid is not None and named_in(self._new_lines(), how.pid)
        what = meaning(how.cause, how.code, dumped=how.dumped, before=before, after=self._before, named=named)
        text = "" if how.is_clean else what.text
        return wire.WorkerDied(
            worker=worker,
            cause=how.cause,
            code=how.code,
            at=time.time(),
            kind=what.kind,
            meaning=text,
            output=output,
        )

    def explain(self, report: wire.ErrorReport) -> wire.ErrorReport:
        """Explain a worker's report that one of its own processes was killed."""
        if report.details.get("pattern") != "data-worker-signal" or "Killed" not in str(report.details.get("message")):
            return report
        before, self._before = self._before, self.now()
        what = meaning("signal", 9, before=before, after=self._before)
        if what.kind is None:
            return report
        return msgspec.structs.replace(report, kind=what.kind, cause=f"{report.cause} ({what.text})")

    def _new_lines(self) -> list[str]:
        """Return the kernel's log lines since the last call."""
        lines: list[str] = []
        while self._log is not None and len(lines) < _RECORDS:
            try:
                record = os.read(self._log, _RECORD_BYTES)
            except BrokenPipeError:  # records were overwritten before they were read
                continue
            except OSError:
                break
            if not record:
                break
            lines.append(record.decode(errors="replace"))
        return lines


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


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
            cause, stacks = order.cause, await self._stacks(process)
        logger.warning("worker_hangs worker=%s cause=%s\n%s", order.worker, cause, stacks)
        if self._supervisor.find(order.worker) is None:
            return  # its end is reported already
        report = wire.ErrorReport(
            worker=order.worker,
            kind=order.kind,
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
        if why == "stopped":
            return f"{order.cause}; {WORDS[why]}", ""
        if why == "computes" and (
            await ask(self._folder, process.pid) or frozen(after, look(process.pid)) not in {"holds", "computes"}
        ):
            return None  # the lock is free: it was only slow
        # The signal may interrupt a call that sleeps with the lock: the worker then sends a message, and still hangs.
        stacks = await capture(self._folder, process.pid, process.pidfd)
        if not stacks or _COLLECTING in stacks:
            return None
        return f"{order.cause}; {WORDS[why]}", stacks

    async def _stacks(self, process: WatchedProcess) -> str:
        """Return the stacks of a worker that sends messages; "" if it neither answers nor is frozen by now."""
        before = look(process.pid)
        stacks = await ask(self._folder, process.pid)
        if stacks or frozen(before, look(process.pid)) not in {"holds", "computes"}:
            return stacks
        return await capture(self._folder, process.pid, process.pidfd)


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
