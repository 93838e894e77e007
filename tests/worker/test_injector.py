"""Due times of a worker's faults, and the injector's actions; no processes."""

from __future__ import annotations

import itertools
import math
import threading
import time
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unicron_lightning import wire
from unicron_lightning.detection.exceptions import describe
from unicron_lightning.faults.arrivals import FaultTimer, Point
from unicron_lightning.faults.fault import EXAMPLES, HANGS, parse
from unicron_lightning.worker.communication.communicator import CommunicatorAborted
from unicron_lightning.worker.engine import Engine, World
from unicron_lightning.worker.injector import Injector, corrupt_next_gradient, hang, library_error

HERE = Point(phase="forward", index=0, step=5, rank=1, nodes=("a", "b", "b"), has_state=True, at=1.0)


def watch(words: str, choice: float = 0.5) -> FaultTimer:
    return FaultTimer(parse(words), choice, Random(1))


@pytest.mark.parametrize(
    ("words", "changes", "due"),
    [
        ("kill", {}, True),
        ("kill", {"rank": 0}, False),
        ("kill rank=1", {"phase": "agree", "index": None}, True),
        ("kill rank=-2", {}, True),
        ("kill node=a", {}, False),
        ("kill node=b rank=all", {"rank": 2}, True),
        ("kill step=5", {}, True),
        ("kill step=5", {"step": 6}, False),
        ("kill from_step=5", {"step": 9}, True),
        ("kill from_step=5", {"step": 4}, False),
        ("kill micro_batch=0", {}, False),
        ("kill micro_batch=0", {"phase": "micro_batch"}, True),
        ("kill micro_batch=1", {"phase": "micro_batch"}, False),
        ("kill micro_batch=0 phase=forward", {}, True),
        ("kill bucket=2", {"phase": "launched", "index": 2}, True),
        ("kill bucket=2", {"phase": "micro_batch", "index": 2}, False),
        ("kill phase=commit", {}, False),
        ("kill phase=commit", {"phase": "commit", "index": None}, True),
        ("slow x2", {"phase": "commit", "index": None}, False),
        ("slow x2 micro_batch=0", {}, True),
        ("corrupt gradient", {}, True),
        ("kill joiner=yes", {}, False),
        ("kill joiner=yes", {"has_state": False}, True),
        ("kill world=3", {}, True),
        ("kill world=3", {"nodes": ("a", "b")}, False),
        ("kill point=mine", {}, False),
        ("kill point=mine", {"phase": "script", "name": "other"}, False),
        ("kill point=mine", {"phase": "script", "name": "mine"}, True),
        ("kill point=mine micro_batch=1", {"phase": "script", "name": "mine"}, False),
        ("kill after=2s", {}, False),
        ("kill after=2s", {"at": 2.0}, True),
    ],
)
def test_where_a_fault_is_due(words: str, changes: dict[str, Any], due: bool) -> None:
    assert watch(words).due(replace(HERE, **changes)) is due


def test_one_that_is_over_is_not_due() -> None:
    looked = watch("kill")
    assert looked.due(HERE)
    looked.over = True
    assert not looked.due(HERE)


@given(st.floats(0, 1, exclude_max=True), st.integers(1, 9))
def test_all_workers_choose_the_same_victim(choice: float, size: int) -> None:
    due = [watch("kill", choice).due(replace(HERE, rank=rank, nodes=("a",) * size)) for rank in range(size)]
    assert sum(due) == 1


def test_a_rate_is_shared_by_those_that_fit() -> None:
    struck = [0, 0, 0]
    watches = [FaultTimer(parse("kill node=b rate=3600/h"), 0.0, Random(rank)) for rank in range(3)]
    for tick in range(20_000):
        for rank, looked in enumerate(watches):
            struck[rank] += looked.due(replace(HERE, rank=rank, at=tick / 10))
    assert struck[0] == 0 and sum(struck) == pytest.approx(2000, rel=0.1), "one per second, on two workers"
    assert struck[1] == pytest.approx(struck[2], rel=0.2)


def test_a_rate_waits_for_the_place_and_begins_when_it_may() -> None:
    looked = watch("kill rank=1 rate=100/s phase=commit after=5s")
    assert not looked.due(replace(HERE, at=4.0, phase="commit"))
    assert not looked.due(replace(HERE, at=6.0)), "due, but not here"
    assert looked.due(replace(HERE, at=6.0, phase="commit"))


class FakeControl:
    """Answers like the coordinator."""

    worker = "a-1/0#1"

    def __init__(self, *answers: bool | None) -> None:
        self.answers = list(answers)
        self.asked: list[wire.FaultDue] = []

    def claim(self, due: wire.FaultDue, seconds: float) -> wire.FaultRecorded | None:
        self.asked.append(due)
        answer = self.answers.pop(0)
        if answer is None:
            return None
        return wire.FaultRecorded(worker=due.worker, claim=due.claim, fault=due.fault, strikes=answer)


def engine_of(control: FakeControl | None, size: int = 1) -> Engine:
    engine = Engine(None, None, lambda world: None, False)  # type: ignore[arg-type]
    engine.control = control  # type: ignore[assignment]
    engine._world = World(epoch=1, kind="init", rank=0, size=size, hold=False, nodes=("a",) * size)
    return engine


def step(engine: Engine, number: int, seconds: float = 0.0, model: Any = None, sleep: Any = time.sleep) -> None:
    """Pass the points of a step of two micro-batches."""
    engine.step = number
    for place in range(2):
        engine.fault("forward", number, place, model)
        sleep(seconds)
        engine.fault("micro_batch", number, place)
    engine.fault("commit", number)


def test_nothing_is_installed_until_something_is_injected() -> None:
    engine = engine_of(None)
    assert not isinstance(engine.fault, Injector)
    injector = Injector.of(engine)
    assert engine.fault is injector is Injector.of(engine)


def test_who_listened_before_still_does() -> None:
    engine, heard = engine_of(None), []
    engine.fault = lambda *point: heard.append(point)
    Injector.of(engine)
    step(engine, 0)
    assert [point[0] for point in heard] == ["forward", "micro_batch", "forward", "micro_batch", "commit"]


def test_it_raises_at_the_point_once_and_as_it_was_noted() -> None:
    control = FakeControl(True)
    engine = engine_of(control)
    Injector.of(engine).add("k", parse("raise ecc_error step=1 micro_batch=1"))
    step(engine, 0)
    with pytest.raises(torch.AcceleratorError, match="uncorrectable ECC error"):
        step(engine, 1)
    (asked,) = control.asked
    assert (asked.key, asked.most, asked.fault) == ("k", 1, "raise ecc_error step=1 micro_batch=1")
    assert asked.fields == {"rank": 0, "step": 1, "phase": "micro_batch", "index": 1}
    step(engine, 1)  # the step is repeated: the fault has struck
    assert control.asked == [asked]


def test_a_point_of_the_script_s_own() -> None:
    control = FakeControl(True)
    engine = engine_of(control)
    Injector.of(engine).add("k", parse("raise connection_failed step=1 point=mine micro_batch=1"))
    step(engine, 0)
    engine.step = 1
    for place in range(2):
        engine.fault("forward", 1, place, None)
        engine.fault("script", "other")
        if place == 0:
            engine.fault("script", "mine")
    with pytest.raises(RuntimeError, match="Connection closed") as raised:
        engine.fault("script", "mine")
    assert not isinstance(raised.value, CommunicatorAborted), "it is no operation of the engine's"
    assert control.asked[0].fields == {"rank": 0, "step": 1, "phase": "mine", "index": 1}


def test_another_may_be_asked_instead_of_the_coordinator() -> None:
    engine, asked = engine_of(None), []
    injector = Injector(engine, lambda key, fault, point: bool(asked.append((key, fault.kind, point.phase))))
    injector.add("k", parse("kill agent phase=commit"))
    for _ in range(2):
        injector("commit", 0)
    assert asked == [("k", "kill agent", "commit")], "what may not strike is not asked for again"


@pytest.mark.parametrize("how", HANGS)
def test_a_hang_lasts_as_long_as_it_says_and_gil_stops_the_other_threads(how: str) -> None:
    ticks, over, seconds = [], threading.Event(), 0.6

    def tick() -> None:
        while not over.wait(0.001):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        began = time.monotonic()
        hang(how, seconds)
        ended = time.monotonic()
    finally:
        over.set()
        thread.join()
    assert ended - began >= seconds
    moments = [began, *(at for at in ticks if began < at < ended), ended]
    longest = max(later - earlier for earlier, later in itertools.pairwise(moments))
    assert (longest > seconds / 2) == (how == "gil"), "how long no other thread has run"


@pytest.mark.parametrize("answer", [False, None])
def test_what_is_not_noted_does_not_strike(answer: bool | None) -> None:
    control = FakeControl(answer)
    engine = engine_of(control)
    Injector.of(engine).add("k", parse("exit 1"))
    step(engine, 0)
    step(engine, 1)
    assert len(control.asked) == 1


def test_a_world_of_one_counts_by_itself() -> None:
    engine = engine_of(None)
    Injector.of(engine).add("k", parse("hang for=1ms times=2"))
    Injector.of(engine).add("l", parse("raise connection_failed from_step=1"))
    Injector.of(engine).add("m", parse("kill agent"))
    Injector.of(engine).add("n", parse("kill task=other"))
    step(engine, 0)
    with pytest.raises(RuntimeError, match="Connection closed by peer") as raised:
        step(engine, 1)
    assert not isinstance(raised.value, CommunicatorAborted), "there is nobody to connect to"
    step(engine, 2)


@pytest.mark.parametrize(("phase", "kind"), [("commit", CommunicatorAborted), ("validation", RuntimeError)])
def test_a_broken_connection_is_one_to_the_engine(phase: str, kind: type[Exception]) -> None:
    engine = engine_of(FakeControl(True))
    Injector.of(engine).add("k", parse(f"raise connection_failed phase={phase}"))
    with pytest.raises(kind, match="Connection closed by peer"):
        engine.fault(phase, 0)


class FakeTime:
    """A clock that advances only during sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(("lasts", "slow"), [("steps=2", [1, 2]), ("for=300ms", [1, 2]), ("", [1, 2, 3, 4])])
def test_a_slow_worker_takes_so_many_times_as_long(
    lasts: str, slow: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeTime()
    monkeypatch.setattr("unicron_lightning.worker.injector.time", clock)
    engine = engine_of(FakeControl(True))
    Injector.of(engine).add("k", parse(f"slow x4 from_step=1 {lasts}"))
    for number in range(5):
        began = clock.now
        step(engine, number, 0.02, sleep=clock.sleep)
        assert clock.now - began == pytest.approx(0.16 if number in slow else 0.04), number


def test_a_corrupt_gradient_is_nan_once() -> None:
    engine, model = engine_of(FakeControl(True)), torch.nn.Linear(2, 1)
    Injector.of(engine).add("k", parse("corrupt gradient step=1 micro_batch=1"))

    def gradient(number: int, place: int) -> float:
        model.zero_grad()
        engine.step = number
        engine.fault("forward", number, place, model)
        model(torch.ones(3, 2)).sum().backward()
        assert model.weight.grad is not None
        return float(model.weight.grad.sum())

    values = [gradient(number, place) for number in range(3) for place in range(2)]
    assert [math.isnan(value) for value in values] == [False, False, False, True, False, False]


def test_a_model_without_gradients_is_spared() -> None:
    corrupt_next_gradient(torch.nn.Linear(1, 1).requires_grad_(False))


def test_an_order_strikes_the_worker_it_was_sent_to(caplog: pytest.LogCaptureFixture) -> None:
    control = FakeControl(True)
    engine = engine_of(control)
    words = {"fault": "raise cuda_error rank=all", "ordered": "raise cuda_error rank=0"}
    Injector.of(engine).order(wire.Inject(worker=control.worker, key="order of 1", **words))
    with pytest.raises(torch.AcceleratorError, match="device-side assert"):
        step(engine, 0)
    assert control.asked[0].key == "order of 1 at rank 0"
    assert control.asked[0].fault == words["ordered"] and repr(words["ordered"]) in caplog.text, "as it was ordered"


@pytest.mark.parametrize("kind", EXAMPLES)
@pytest.mark.parametrize("in_operation", [True, False])
def test_what_is_raised_is_classified_as_what_it_is(kind: str, in_operation: bool) -> None:
    assert describe(library_error(kind, in_operation)).kind == kind
