"""When workers that the coordinator has declared dead are killed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from unicron_lightning import wire
from unicron_lightning.agent.workers.roster import ENDING_SECONDS, SIBLING_SECONDS, Fencing, Roster
from unicron_lightning.worker.siblings import HOOKS_SECONDS

REPORT = wire.ErrorReport(
    worker="a/0#1",
    kind="other_software_error",
    cause="ValueError: 3",
    phase="compute",
    step=3,
    at=0.0,
    details={},
    ends=True,
)


class Bench:
    """Two workers of an agent, in a trainer's run; functions that are due later, by seconds."""

    def __init__(self) -> None:
        self.roster = Roster()
        self.killed: list[str] = []
        self.due: list[tuple[float, Callable[[], object]]] = []
        self.fencing = Fencing(self.roster, self._later, self.killed.append)
        for rank in range(2):
            self.roster.add(f"a/{rank}#1", rank)
            self.hear(f"a/{rank}#1", wire.Training(worker=f"a/{rank}#1", active=True))

    def _later(self, delay: float, callback: Callable[..., object], *args: Any) -> None:
        self.due.append((delay, lambda: callback(*args)))

    def hear(self, worker: str, message: wire.FromWorker) -> None:
        self.roster.heard(worker, message, time.monotonic())
        self.fencing.heard(worker)

    def pass_time(self) -> list[float]:
        due, self.due = self.due, []
        for _, callback in due:
            callback()
        return [delay for delay, _ in due]


def test_a_fenced_worker_is_killed_at_once_and_when_it_is_found_later() -> None:
    bench = Bench()
    bench.fencing.fence("a/0#1")
    bench.fencing.fence("a/7#1")
    assert bench.killed == ["a/0#1", "a/7#1"] and not bench.due
    bench.fencing.found("a/7#1")
    bench.fencing.found("a/1#1")
    assert bench.killed == ["a/0#1", "a/7#1", "a/7#1"]
    bench.fencing.begin_round()
    assert "a/7#1" not in bench.fencing


def test_the_sibling_of_a_worker_that_ends_by_an_error_may_report_its_own_error() -> None:
    bench = Bench()
    bench.hear("a/0#1", REPORT)
    bench.fencing.fence("a/1#1")
    assert not bench.killed
    bench.hear("a/1#1", REPORT)
    assert [delay for delay, _ in bench.due] == [HOOKS_SECONDS, SIBLING_SECONDS, HOOKS_SECONDS]
    hooks = bench.due.pop(1)
    hooks[1]()
    assert not bench.killed and bench.roster.staying == []
    assert "a/1#1" in bench.fencing, "it gets no epoch any more"


def test_a_sibling_without_an_error_is_killed_in_a_second() -> None:
    bench = Bench()
    bench.hear("a/0#1", REPORT)
    bench.due.clear()
    bench.fencing.fence("a/1#1")
    assert bench.pass_time() == [SIBLING_SECONDS] and bench.killed == ["a/1#1"]
    assert bench.roster.staying == ["a/1#1"]


def test_a_worker_has_one_limit_for_the_hooks_of_its_error_and_another_for_its_exit() -> None:
    bench = Bench()
    bench.hear("a/0#1", REPORT)
    bench.hear("a/0#1", wire.Training(worker="a/0#1", active=False))
    assert bench.roster.trains("a/0#1"), "an exit with status 0 is no success"
    assert bench.pass_time() == [HOOKS_SECONDS, ENDING_SECONDS] and bench.killed == ["a/0#1"] * 2
