"""Diagnosis of a process that does not answer. Pure: judged from two looks at the kernel's accounts of its threads.

A process whose control thread is silent may be *stopped* (SIGSTOP), may *hold* the interpreter's lock in a call that
sleeps, or may *compute* with the lock held. These are distinguished from a process that is merely slow: a thread of it
waits for a CPU or for a disk, and continues when it gets it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Frozen = Literal["stopped", "holds", "computes"]
WORDS: Final[Mapping[Frozen, str]] = {
    "stopped": "its process is stopped by a signal",
    "holds": "its threads use no CPU: a call sleeps with the interpreter's lock",
    "computes": "its threads use the CPU: a call computes with the interpreter's lock",
}
COLLECTING: Final = "Garbage-collecting"
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
