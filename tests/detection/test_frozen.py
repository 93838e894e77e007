"""Stopped, holding the interpreter's lock, computing with it, or only slow: judged from two looks at the threads."""

from __future__ import annotations

import pytest

from unicron_lightning.agent.workers.inspection import Frozen, Look, ThreadTimes, frozen

Times = tuple[str, float, float]
STILL: Times = ("S", 0.0, 0.0)


def looks(*threads: tuple[str, Times], seconds: float = 1.0) -> tuple[Look, Look]:
    """Two samples: by thread, its state in the first one, and its state and increments in the second."""
    before = {number: ThreadTimes(state=state, ran=5.0, waited=7.0) for number, (state, _) in enumerate(threads)}
    after = {
        number: ThreadTimes(state=state, ran=5.0 + ran, waited=7.0 + waited)
        for number, (_, (state, ran, waited)) in enumerate(threads)
    }
    return Look(at=100.0, main=0, threads=before), Look(at=100.0 + seconds, main=0, threads=after)


@pytest.mark.parametrize(
    ("threads", "expected"),
    [
        ((("T", ("T", 0.0, 0.0)),), "stopped"),
        ((("S", ("T", 0.0, 0.0)),), None),  # stopped just now
        ((("T", ("S", 0.0, 0.0)),), None),  # and continued
        ((("t", ("t", 0.0, 0.0)),), None),  # a debugger's
        ((("S", STILL), ("S", ("S", 0.02, 0.01))), "holds"),  # the second thread wakes and waits for the lock
        ((("R", ("R", 0.95, 0.05)), ("S", ("S", 0.02, 0.01))), "computes"),
        ((("S", STILL), ("R", ("R", 0.95, 0.05))), "computes"),
        ((("R", ("R", 0.2, 0.8)), ("S", STILL)), None),  # other processes keep it from the CPU
        ((("R", ("R", 0.0, 0.0)), ("S", STILL)), None),  # the wait continues, and is not counted yet
        ((("S", STILL), ("R", ("S", 0.2, 0.6))), None),
        ((("D", ("D", 0.0, 0.0)), ("S", STILL)), None),
        ((("S", STILL), ("D", ("D", 0.0, 0.0))), None),
        ((("S", ("Z", 0.0, 0.0)),), None),
        ((), None),
    ],
)
def test_what_a_process_does(threads: tuple[tuple[str, Times], ...], expected: Frozen | None) -> None:
    assert frozen(*looks(*threads)) == expected


def test_one_look_says_nothing() -> None:
    before, after = looks(("T", ("T", 0.0, 0.0)), seconds=0.0)
    assert frozen(before, after) is None
