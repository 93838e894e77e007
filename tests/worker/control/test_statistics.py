"""Usual, degraded and failed steps from sequences of steps; and a monitor without false alarms."""

from __future__ import annotations

import os
import random
import sys
import threading
from pathlib import Path

import pytest

from unicron_lightning import wire
from unicron_lightning.worker.control.activity import Activity, ActivityPhase, StepTimes
from unicron_lightning.worker.control.monitor import BUSY, TICK_SECONDS, Monitor
from unicron_lightning.worker.control.statistics import RECENT, WARM_UP, StepStatistics

LIMITS = wire.WatchLimits()


def step(seconds: float = 0.05, epoch: int = 1, micro_batches: int = 4, **phases: float) -> StepTimes:
    times = {"compute": 0.8 * seconds, "reduce": 0.1 * seconds, "commit": 0.1 * seconds, **phases}
    return StepTimes(step=1, epoch=epoch, seconds=seconds, phases=times, micro_batches=micro_batches)


def steps(number: int, seconds: float = 0.05, noise: float = 0.02, seed: int = 0, **about: object) -> list[StepTimes]:
    chance = random.Random(seed)
    return [step(seconds * chance.gauss(1, noise), **about) for _ in range(number)]  # type: ignore[arg-type]


def test_a_step_has_failed_after_three_times_the_average() -> None:
    known = StepStatistics()
    known.take(steps(1 + WARM_UP - 1))
    limit = known.limit(steady=True)
    assert limit is not None and limit > LIMITS.change_time, "only the first steps are known"
    known.take(steps(1))
    assert known.limit(steady=True) == pytest.approx(3 * 0.05 + LIMITS.slack, rel=0.05)
    known.take([step(60.0)])
    assert known.mean == pytest.approx(0.05, rel=0.05), "one long step changes nothing"


def test_another_thread_reads_the_statistics_while_steps_are_added() -> None:
    monitor, begun, ended = Monitor("w", Activity()), threading.Event(), threading.Event()

    def add() -> None:
        while not ended.is_set():
            monitor.activity.finished.extend(steps(20))
            monitor.take()
            begun.set()

    adding = threading.Thread(target=add)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    adding.start()
    try:
        assert begun.wait(60)
        paces = [monitor.pace().steps for _ in range(500)]
    finally:
        ended.set()
        adding.join(60)
        sys.setswitchinterval(before)
    assert len(paces) == 500 and min(paces) > 0


def test_steps_in_which_a_witness_repeats_a_micro_batch_count() -> None:
    """Every second one: a share that changed from step to step would never have an average."""
    now = [0.0]
    activity = Activity(lambda: now[0])
    monitor = Monitor("w", activity)
    for number in range(1, 20):
        activity.enter("compute")
        now[0] += 0.01 * (2 + number % 2)
        activity.computed()
        activity.computed()
        if number % 2:
            activity.repeated()
        activity.enter("commit")
        assert activity.busy() == pytest.approx(0.01)
        activity.committed(number)
    monitor.take()
    summary = monitor.summary()
    assert summary.mean is not None and summary.micro_batches == 2 and summary.busy == pytest.approx(0.01)


def test_what_varies_by_nature_may_take_longer() -> None:
    known = StepStatistics()
    known.take([step(0.2 if number % 8 == 0 else 0.1) for number in range(80)])
    limit = known.limit(steady=True)
    assert limit is not None and limit >= 2 * 0.2 + LIMITS.slack


def test_steps_in_which_something_else_was_done_do_not_count() -> None:
    known = StepStatistics()
    known.take(steps(30))
    for other in ("validation", "checkpoint", "recovery", "epoch_end", "hold"):
        known.take([step(5.0, **{other: 4.95})] * 3)
    known.take(steps(1, micro_batches=8, seconds=0.1))  # the first step with another share
    summary = known.summary()
    assert summary.steps == 29 and summary.mean == pytest.approx(0.05, rel=0.05)
    assert summary.phases.keys() == {"compute", "reduce", "commit"}


def test_after_a_change_of_the_world_what_was_usual_is_so_no_more() -> None:
    known = StepStatistics()
    known.take(steps(300))
    known.take(steps(1, epoch=2, seconds=3.0))
    assert known.mean is None
    limit = known.limit(steady=True)
    assert limit == pytest.approx(10 * 0.05 + LIMITS.change_time, rel=0.05), "judged by what was before"
    known.take(steps(300, epoch=2, seconds=0.1))
    assert known.summary().slowdown == 1.0 and known.mean == pytest.approx(0.1, rel=0.05)


def test_a_task_that_is_slower_for_a_while_is_degraded_until_it_is_not() -> None:
    known = StepStatistics()
    known.take(steps(300))
    assert known.summary().slowdown == 1.0
    known.take([*steps(3, seconds=0.2), *steps(RECENT)])
    assert known.summary().slowdown == 1.0, "three slow steps are no while"
    known.take(steps(2000, seconds=0.06))
    assert known.summary().slowdown == pytest.approx(1.2, rel=0.05), "it does not get used to it"
    known.take(steps(2 * RECENT))
    assert known.summary().slowdown == 1.0
    noisy = StepStatistics()
    noisy.take(steps(3000, noise=0.3))
    assert noisy.summary().slowdown == pytest.approx(1.0, abs=0.1)


# ---- the monitor, with a simulated clock


def monitor(worker: Worker, *, on_cpu: bool = True) -> Monitor:
    """A monitor of a machine without other load, whatever the load of this one."""
    made = Monitor("w", worker.activity, on_cpu=on_cpu)
    made._load = os.devnull
    return made


class Worker:
    """A training thread and a monitor that checks it, both in simulated time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.activity = Activity(lambda: self.now)
        self.monitor = monitor(self)
        self.told: list[wire.ActivityReport] = []
        self.next_look = 0.0
        self.starved = 0.0
        self.monitor._scheduled = lambda: (0.0, self.starved)  # type: ignore[method-assign]
        self.steps = 0
        self.activity.epoch = 1

    def spend(self, seconds: float, *, process_runs: bool = True) -> None:
        end = self.now + seconds
        while process_runs and self.next_look <= end:
            self.now = max(self.now, self.next_look)
            self._look()
        self.now = end

    def _look(self) -> None:
        _, doing = self.monitor.tick()
        self.next_look = self.now + TICK_SECONDS
        if doing is not None:
            self.told.append(doing)

    def enter(self, phase: ActivityPhase, seconds: float, *, waiting: bool = False, process_runs: bool = True) -> None:
        self.activity.enter(phase)
        self.activity.waits(waiting)
        self.spend(seconds, process_runs=process_runs)
        self.activity.waits(False)

    def train(self, number: int, compute: float = 0.04, wait: float = 0.005, data: float = 0.001) -> None:
        for _ in range(number):
            self.enter("boundary", 0.0001)
            self.enter("hooks", 0.001)
            self.enter("data", data)
            self.enter("compute", compute)
            self.activity.computed()
            self.enter("reduce", wait, waiting=True)
            self.enter("commit", 0.001, waiting=True)
            self.steps += 1
            self.activity.committed(self.steps)
            self.spend(0.002)

    @property
    def overdue(self) -> list[wire.ActivityReport]:
        return [doing for doing in self.told if doing.overdue]


@pytest.fixture
def worker() -> Worker:
    worker = Worker()
    worker.train(50)
    assert worker.told == []
    return worker


@pytest.mark.parametrize(("phase", "waiting"), [("compute", False), ("reduce", True), ("optimizer", False)])
def test_a_hang_is_told_soon_again_and_again_and_when_it_is_over(
    worker: Worker, phase: ActivityPhase, waiting: bool
) -> None:
    began = worker.now
    worker.enter(phase, 5.5, waiting=waiting)
    first = worker.overdue[0]
    assert (first.phase, first.waiting, first.step) == (phase, waiting, 50)
    limit = first.limit
    assert limit is not None and limit == pytest.approx(3 * 0.05 + 0.25, rel=0.1)
    assert first.seconds - limit < 3 * TICK_SECONDS
    assert worker.now - began > 5 and 5 <= len(worker.overdue) <= 6, "once a second"
    worker.train(3)
    assert not worker.told[-1].overdue, "it goes on"


@pytest.mark.parametrize(
    ("phase", "seconds"), [("validation", 500), ("checkpoint", 500), ("data", 250), ("hooks", 50), ("epoch_end", 500)]
)
def test_what_takes_long_by_nature_is_no_hang(worker: Worker, phase: ActivityPhase, seconds: float) -> None:
    worker.enter(phase, seconds)
    worker.enter("reduce", 0.3, waiting=True)
    worker.train(5)
    assert worker.told == []
    worker.enter(phase, seconds)
    worker.enter("compute", 0.5)
    assert worker.overdue, "but what hangs after it is a hang"


@pytest.mark.parametrize(("phase", "seconds"), [("data", 310), ("hooks", 65), ("validation", 610), ("checkpoint", 610)])
def test_but_not_for_ever(worker: Worker, phase: ActivityPhase, seconds: float) -> None:
    worker.enter(phase, seconds)
    assert worker.overdue and worker.overdue[0].phase == phase and not worker.overdue[0].waiting


@pytest.mark.parametrize("phase", ["hooks", "boundary"])
def test_a_long_wait_for_others_is_told_less_and_less_often(worker: Worker, phase: ActivityPhase) -> None:
    worker.enter(phase, 0.9, waiting=True)
    assert not worker.told
    worker.enter("epoch_end", 0.1)
    worker.enter(phase, 9.0, waiting=True)
    waits = [doing.waits for doing in worker.told if not doing.overdue]
    assert waits == pytest.approx([1.0, 2.0, 4.0, 8.0], abs=3 * TICK_SECONDS)


def test_a_wait_in_a_validation_is_overdue_after_three_times_its_usual_batch(worker: Worker) -> None:
    worker.train(50)
    for seconds, limit in ((1.0, 3.25), (0.1, 0.55)):
        worker.activity.evaluated.clear()
        for number in range(20):
            worker.activity.enter("validation", number)
            worker.spend(seconds)
        worker.activity.enter("validation", 20)
        worker.activity.waits(True)
        told = len(worker.overdue)
        worker.spend(limit - 2 * TICK_SECONDS)
        assert len(worker.overdue) == told
        worker.spend(4 * TICK_SECONDS)
        assert len(worker.overdue) == told + 1
        assert worker.overdue[-1].waiting and worker.overdue[-1].limit == pytest.approx(limit, rel=0.01)
        worker.activity.waits(False)
        worker.activity.enter("hooks")
    assert len(worker.activity.evaluated) == 20, "the part with the wait is none"


def test_a_wait_for_a_checkpoint_is_overdue_after_the_limit_of_a_step(worker: Worker) -> None:
    new = Worker()
    new.enter("checkpoint", LIMITS.change_time - 1.0, waiting=True)
    assert not new.overdue, "it is not known how long a step takes"
    worker.enter("checkpoint", 1.0)
    assert not worker.overdue, "the rank that writes is not"
    worker.enter("checkpoint", 1.0, waiting=True)
    assert worker.overdue and worker.overdue[0].limit == pytest.approx(3 * 0.05 + LIMITS.slack, rel=0.05)


def test_batches_of_a_validation_are_signs_of_life(worker: Worker) -> None:
    for _ in range(10):
        worker.enter("validation", 400)
    assert worker.told == []


def test_a_worker_that_cannot_run_is_not_overdue(worker: Worker) -> None:
    worker.enter("compute", 3.0, process_runs=False)  # the machine stalls, or garbage is collected
    worker.enter("compute", 0.2)
    worker.train(1)
    assert worker.told == []
    for _ in range(10):  # another process has the CPU
        worker.starved += 0.2
        worker.enter("compute", 0.2)
    worker.train(1)
    assert worker.told == []
    worker.starved = 0.0
    worker.enter("compute", 1.0)
    assert worker.overdue, "its own doing"


def test_who_has_waited_long_for_others_is_not_overdue_when_they_have_come(worker: Worker) -> None:
    worker.enter("compute", 0.04)
    worker.activity.enter("commit")
    worker.activity.waits(True)
    worker.spend(7.0)
    assert worker.overdue and worker.overdue[-1].waiting
    told = len(worker.overdue)
    worker.activity.waits(False)
    worker.spend(0.2)  # on a busy machine it waits for a CPU right after
    assert len(worker.overdue) == told
    worker.enter("compute", 0.5)
    assert worker.overdue[-1].phase == "compute", "its own time counts as ever"


def test_the_cpu_that_others_have_had_since_the_step_began_is_left_out(tmp_path: Path) -> None:
    class Schedule:
        """As in /proc: the second number is the time spent waiting for a CPU, in ns; here nine tenths of all time."""

        def __fspath__(self) -> str:
            path = tmp_path / "schedstat"
            path.write_text(f"0 {int(0.9e9 * worker.now)} 0")
            return str(path)

    worker = Worker()
    worker.monitor = monitor(worker)
    worker.monitor._schedule = Schedule()  # type: ignore[assignment]
    worker.train(50)
    worker.enter("compute", 2.0)
    assert worker.told == []
    worker.enter("compute", 4.0)
    assert worker.overdue


def test_who_computes_all_the_time_is_slow_and_not_hung(tmp_path: Path) -> None:
    class Schedule:
        """As in /proc: the first number is the time spent on a CPU, in ns; here four fifths of all time."""

        def __fspath__(self) -> str:
            path = tmp_path / "schedstat"
            path.write_text(f"{int(0.8e9 * worker.now)} 0 0")
            return str(path)

    for on_cpu in (True, False):
        worker = Worker()
        worker.monitor = monitor(worker, on_cpu=on_cpu)
        worker.monitor._schedule = Schedule()  # type: ignore[assignment]
        worker.train(50)
        worker.enter("compute", 1.0)
        assert bool(worker.overdue) is not on_cpu, "an accelerator is waited for by spinning"
        worker.enter("compute", 4.0)
        assert worker.overdue, "it may be an endless loop all the same"


@pytest.mark.parametrize("load", ["{} 0 0 1/300 1", "0 0 0 {}/300 1"])
def test_on_a_crowded_machine_a_hang_is_noticed_later(worker: Worker, tmp_path: Path, load: str) -> None:
    path, processors = tmp_path / "loadavg", os.cpu_count() or 1
    worker.monitor._load = str(path)
    worker.train(50)
    for threads, overdue in ((2 * processors + 1, False), (processors, True)):
        path.write_text(load.format(threads))
        worker.enter("compute", 0.5)
        assert bool(worker.overdue) is overdue
    path.write_text(load.format(2 * processors + 1))
    worker.train(50)
    told = len(worker.overdue)
    worker.enter("compute", 4.0)
    assert len(worker.overdue) > told, "it may be a hang all the same"


def test_on_a_crowded_machine_a_rank_that_waits_asks_as_soon_as_ever(worker: Worker, tmp_path: Path) -> None:
    path = tmp_path / "loadavg"
    path.write_text(f"{3 * (os.cpu_count() or 1)} 0 0 1/300 1")
    worker.monitor._load = str(path)
    worker.train(50)
    worker.enter("reduce", 0.5, waiting=True)
    first = worker.overdue[0]
    assert first.limit is not None and first.seconds < first.limit, "a rank that computes is given the longer limit"
    assert first.seconds == pytest.approx(first.limit / BUSY, abs=2 * TICK_SECONDS)


def test_the_first_step_of_a_world_may_take_longer(worker: Worker) -> None:
    worker.enter("recovery", 400)
    worker.activity.epoch = 2
    worker.enter("compute", 10)
    worker.train(1)
    assert worker.told == []
    worker.train(10)
    worker.enter("compute", 1.0)
    assert worker.overdue
    new = Worker()
    new.enter("start", 1700)
    new.enter("compute", 500)  # the first step compiles
    assert new.told == []


def test_hours_of_ordinary_training_raise_no_alarm() -> None:
    chance, worker = random.Random(1), Worker()
    for _ in range(40):
        for _ in range(20):
            compute = max(0.02, chance.gauss(0.045, 0.01)) * (3 if chance.random() < 0.02 else 1)
            stall = 30.0 if chance.random() < 0.01 else 0.0
            worker.train(1, compute=compute, data=0.001 + stall)
            if chance.random() < 0.02:
                worker.enter("compute", 1.5, process_runs=False)  # a garbage collection
        for _ in range(5):
            worker.enter("validation", chance.uniform(0, 20))
        worker.enter("checkpoint", chance.uniform(0, 60))
        worker.enter("epoch_end", chance.uniform(0, 60))
    assert worker.told == []
    assert worker.now > 1000
