"""Kernel evidence of a worker's death: counters of the OOM killer, the kernel log, usage of shared memory.

Counters are read when a worker is found and after each death, the log from the agent's start on. An unreadable source,
such as the log in most containers, is no evidence.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Final

import msgspec

from unicron_lightning import wire
from unicron_lightning.agent.workers.supervisor import Exit
from unicron_lightning.detection.exits import Memory, counter, group_of, meaning, named_in

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
