"""What the end of a process means: statuses, signals, and whether the kernel killed it for want of memory. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

LEFT_EARLY: Final = 77
"""Stands for status 0 of a worker that was in the middle of a run: that is no end of a task."""
STATUSES: Final = {
    1: "an uncaught exception, in Python",
    2: "wrong arguments, or a shell's own error",
    75: "expelled: it was given up while it lived",
    76: "its agent was gone",
    LEFT_EARLY: "its script left with status 0 in the middle of a run",
    120: "its last output could not be written",
    126: "the command is not executable",
    127: "the command was not found",
    255: "ended with -1, or a remote shell failed",
}
SIGNALS: Final = {
    signal.SIGABRT: "it aborted itself: an uncaught C++ exception, a failed assertion, or a broken heap",
    signal.SIGBUS: "a mapped file could not be read or backed by memory",
    signal.SIGFPE: "an integer divided by zero",
    signal.SIGHUP: "its terminal or session was closed",
    signal.SIGILL: "an instruction that this processor does not have",
    signal.SIGINT: "interrupted from a keyboard",
    signal.SIGKILL: "killed from outside",
    signal.SIGPIPE: "it wrote where nobody reads",
    signal.SIGQUIT: "told to quit",
    signal.SIGSEGV: "it touched memory that is not its own",
    signal.SIGSYS: "a system call that is not allowed here",
    signal.SIGTERM: "told to end",
    signal.SIGTRAP: "a trap, e.g. of a debugger or a sanitizer",
    signal.SIGXCPU: "its limit of processor time",
    signal.SIGXFSZ: "its limit of file size",
}
FULL_PERCENT: Final = 99.0
"""From here on a shared memory file system counts as full."""
_KILLED: Final = re.compile(
    r"[Oo]ut of memory: Killed process (\d+)|oom-kill:.*\bpid=(\d+)\b|oom_reaper: reaped process (\d+)"
)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Evidence of a moment; None where it cannot be read.

    Attributes:
        group_kills: processes of the worker's memory cgroup that the kernel has killed.
        machine_kills: the same of the whole machine.
        shared_percent: how full the file system of shared memory is.
    """

    group_kills: int | None = None
    machine_kills: int | None = None
    shared_percent: float | None = None


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """Of an end: the kind of error if it is none but an abnormal exit, and the words."""

    kind: Literal["out_of_memory"] | None
    text: str


def meaning(
    cause: Literal["exit", "signal"],
    code: int,
    *,
    dumped: bool = False,
    before: Memory | None = None,
    after: Memory | None = None,
    named: bool = False,
) -> Meaning:
    """What an end means.

    Args:
        cause: by a status or by a signal.
        code: which.
        dumped: whether a core was written.
        before: evidence from when all was well.
        after: evidence of now.
        named: whether the kernel's log names the process as killed for want of memory.
    """
    before, after = before or Memory(), after or Memory()
    number = code if cause == "signal" else code - 128 if 128 < code < 128 + signal.NSIG else 0
    if number == signal.SIGKILL and (evidence := _out_of_memory(before, after, named=named)):
        words = f"the kernel killed it for want of memory ({evidence})"
        return Meaning(kind="out_of_memory", text=f"{_name(cause, code)}: {words}")
    if number == signal.SIGBUS and (after.shared_percent or 0.0) >= FULL_PERCENT:
        full = f"shared memory is full ({after.shared_percent:.0f} % of /dev/shm)"
        return Meaning(kind="out_of_memory", text=f"{_name(cause, code)}: {full}")
    known = (SIGNALS.get(signal.Signals(number)) if number in _NUMBERS else STATUSES.get(code)) or ""
    if cause == "exit" and number in _NUMBERS:
        known = f"as a shell tells of {signal.Signals(number).name}: {known}"
    text = _name(cause, code) + (f": {known}" if known else "") + (", core dumped" if dumped else "")
    return Meaning(kind=None, text=text)


def named_in(lines: Iterable[str], pid: int) -> bool:
    """Whether lines of the kernel's log say that it killed the process for want of memory."""
    return any(str(pid) in match.groups() for line in lines for match in _KILLED.finditer(line))


def group_of(text: str) -> Mapping[str, str]:
    """From ``/proc/PID/cgroup``: the path in the hierarchy of v2 (key "") and in that of v1's memory controller."""
    found = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            found["memory" if controllers else ""] = path
    return found


def counter(text: str, name: str) -> int | None:
    """A number from lines of the form ``name number``: memory.events, memory.oom_control, /proc/vmstat."""
    for line in text.splitlines():
        key, _, number = line.partition(" ")
        if key == name and number.strip().isdigit():
            return int(number)
    return None


def _out_of_memory(before: Memory, after: Memory, *, named: bool) -> str:
    """By what it is known; "" if it is not."""
    if named:
        return "the kernel's log names it"
    if before.group_kills is not None and after.group_kills is not None:
        # What happens elsewhere on the machine is no evidence where the own group can be asked.
        return f"oom_kill of its cgroup: {after.group_kills}" if after.group_kills > before.group_kills else ""
    if before.machine_kills is None or after.machine_kills is None:
        return ""
    return f"oom_kill of the machine: {after.machine_kills}" if after.machine_kills > before.machine_kills else ""


def _name(cause: str, code: int) -> str:
    named = cause == "signal" and code in _NUMBERS
    return f"{cause} {code}" + (f" ({signal.Signals(code).name})" if named else "")


_NUMBERS: Final = frozenset(int(each) for each in signal.Signals)
