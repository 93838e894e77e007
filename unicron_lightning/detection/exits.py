"""Meaning of a process's end: statuses, signals, and whether the kernel killed it for lack of memory. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

LEFT_EARLY: Final = 77
"""Replaces status 0 of a worker in the middle of a run, which is not the end of its task."""
STATUSES: Final = {
    1: "an uncaught exception, in Python",
    2: "wrong arguments, or a shell's own error",
    75: "fenced: it was declared dead while it lived",
    76: "its agent had exited",
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
    signal.SIGPIPE: "it wrote to a pipe or socket without a reader",
    signal.SIGQUIT: "asked to quit",
    signal.SIGSEGV: "it touched memory that is not its own",
    signal.SIGSYS: "a system call that is not allowed here",
    signal.SIGTERM: "asked to end",
    signal.SIGTRAP: "a trap, e.g. of a debugger or a sanitizer",
    signal.SIGXCPU: "its limit of processor time",
    signal.SIGXFSZ: "its limit of file size",
}
FULL_PERCENT: Final = 99.0
"""Usage from which a shared memory file system counts as full."""
_KILLED: Final = re.compile(
    r"[Oo]ut of memory: Killed process (\d+)|oom-kill:.*\bpid=(\d+)\b|oom_reaper: reaped process (\d+)"
)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Evidence at one moment; None for unreadable values.

    Attributes:
        group_kills: processes of the worker's memory cgroup that the kernel has killed.
        machine_kills: processes of the whole machine that the kernel has killed.
        shared_percent: usage of the shared memory file system.
    """

    group_kills: int | None = None
    machine_kills: int | None = None
    shared_percent: float | None = None


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """Meaning of an end: the kind of error, if it is more than an abnormal exit, and a description."""

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
    """Interpret the end of a process.

    Args:
        cause: a status or a signal.
        code: its number.
        dumped: whether a core was written.
        before: evidence from before the end.
        after: evidence from after the end.
        named: whether the kernel's log names the process as killed for lack of memory.
    """
    before, after = before or Memory(), after or Memory()
    number = code if cause == "signal" else code - 128 if 128 < code < 128 + signal.NSIG else 0
    if number == signal.SIGKILL and (evidence := _out_of_memory(before, after, named=named)):
        words = f"the kernel killed it for lack of memory ({evidence})"
        return Meaning(kind="out_of_memory", text=f"{_name(cause, code)}: {words}")
    if number == signal.SIGBUS and (after.shared_percent or 0.0) >= FULL_PERCENT:
        full = f"shared memory is full ({after.shared_percent:.0f} % of /dev/shm)"
        return Meaning(kind="out_of_memory", text=f"{_name(cause, code)}: {full}")
    known = (SIGNALS.get(signal.Signals(number)) if number in _NUMBERS else STATUSES.get(code)) or ""
    if cause == "exit" and number in _NUMBERS:
        known = f"as a shell reports {signal.Signals(number).name}: {known}"
    text = _name(cause, code) + (f": {known}" if known else "") + (", core dumped" if dumped else "")
    return Meaning(kind=None, text=text)


def named_in(lines: Iterable[str], pid: int) -> bool:
    """Whether lines of the kernel's log report that it killed the process for lack of memory."""
    return any(str(pid) in match.groups() for line in lines for match in _KILLED.finditer(line))


def group_of(text: str) -> Mapping[str, str]:
    """Parse ``/proc/PID/cgroup``: the path in the hierarchy of v2 (key "") and in that of v1's memory controller."""
    found = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            found["memory" if controllers else ""] = path
    return found


def counter(text: str, name: str) -> int | None:
    """Return a number from lines of the form ``name number``: memory.events, memory.oom_control, /proc/vmstat."""
    for line in text.splitlines():
        key, _, number = line.partition(" ")
        if key == name and number.strip().isdigit():
            return int(number)
    return None


def _out_of_memory(before: Memory, after: Memory, *, named: bool) -> str:
    """Return the evidence for a kill by the kernel; "" if there is none."""
    if named:
        return "the kernel's log names it"
    if before.group_kills is not None and after.group_kills is not None:
        # If the own group is readable, events elsewhere on the machine are no evidence.
        return f"oom_kill of its cgroup: {after.group_kills}" if after.group_kills > before.group_kills else ""
    if before.machine_kills is None or after.machine_kills is None:
        return ""
    return f"oom_kill of the machine: {after.machine_kills}" if after.machine_kills > before.machine_kills else ""


def _name(cause: str, code: int) -> str:
    named = cause == "signal" and code in _NUMBERS
    return f"{cause} {code}" + (f" ({signal.Signals(code).name})" if named else "")


_NUMBERS: Final = frozenset(int(each) for each in signal.Signals)
