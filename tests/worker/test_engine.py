"""Step protocol and recovery, with simulated failures at every fault point and at random."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from worker.simulation import Coordinator, Fault, Killed, LateFault, TaskIsOver, run_threads

from unicron_lightning.checkpoints.saving import WriteFile
from unicron_lightning.errors import ProgramsDiffer
from unicron_lightning.worker.buckets import FlatBucket, GradientBuckets
from unicron_lightning.worker.codec import unpack_parts
from unicron_lightning.worker.communication.communicator import STOP, gather_bytes
from unicron_lightning.worker.engine import Engine
from unicron_lightning.worker.operations import Agreement, Evaluation, Join
from unicron_lightning.worker.rows import ReportSum, plan_rows
from unicron_lightning.worker.step import GradientStep

MICRO_BATCHES = 5
STEPS = 3


class CountSum:
    """A `Sums` that counts the micro-batches of the step, in a bucket and in the commit."""

    def __init__(self) -> None:
        self.bucket = FlatBucket(torch.zeros(1, dtype=torch.float64))
        self.total = 0.0
        self.settled = 0

    def count(self) -> None:
        self.bucket.local += 1

    @property
    def buckets(self) -> Sequence[FlatBucket]:
        return [self.bucket]

    def totals(self) -> list[float]:
        return [self.bucket.local.item()]

    def read(self, totals: Sequence[float]) -> bool:
        (self.total,) = totals
        return False

    def settle(self, engine: Engine) -> None:
        raise AssertionError("nothing to settle")


class UnsettledSum(CountSum):
    """A sum that must be settled in every step: the ranks' counts are gathered."""

    def read(self, totals: Sequence[float]) -> bool:
        return not super().read(totals)

    def settle(self, engine: Engine) -> None:
        own = b"%d" % int(self.bucket.local.item())
        self.settled = sum(map(int, gather_bytes(engine.communicator, own, engine.tag("settle"))))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def data(step: int, micro_batch: int) -> torch.Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(100 * step + micro_batch)).double()


class Program:
    """A small training: agreement, steps with an evaluation after each, agreement."""

    def __init__(self, engine: Engine, joiner: bool = False, steps: int = STEPS) -> None:
        self.engine = engine
        self.joiner = joiner
        self.steps = steps
        self.net = net()
        self.ran: list[tuple[int, int]] = []
        self.evaluated: list[tuple[int, int]] = []
        self.results: list[Any] = []
        self.finished = False

    def __call__(self) -> Program:
        engine = self.engine
        step = 0
        if self.joiner:
            assert engine.control is not None
            engine.control.ready(0, {"step": 0, "has_state": False})
            step = self._join()
        else:
            parts = unpack_parts(engine.run(Agreement("start", lambda rank: b"%d" % rank)))
            assert parts == [b"%d" % rank for rank in range(len(parts))]
        gradients = GradientBuckets(self.net.named_parameters(), 32, overlap=True)
        try:
            while step < self.steps:
                engine.step = step
                engine.switch(Join(lambda step=step: self._state(step)))  # type: ignore[misc]
                self._step(step, gradients)
                step += 1
                engine.step = step
                self._evaluate(step)
            self.results.append(engine.run(Agreement("end", lambda rank: b"x"))[:0])
        finally:
            gradients.close()
            engine.close()
        self.finished = True
        return self

    def _state(self, step: int) -> bytes:
        from unicron_lightning.worker.codec import encode

        return encode({"step": step, "net": self.net.state_dict(), "results": self.results})

    def _join(self) -> int:
        from unicron_lightning.worker.codec import decode

        join = Join(lambda: b"")
        self.engine.run(join)
        assert join.received is not None and self.engine.has_state
        state = decode(join.received)
        self.net.load_state_dict(state["net"])
        self.results = state["results"]
        assert self.engine.step == state["step"]
        return int(state["step"])

    def _step(self, step: int, gradients: GradientBuckets) -> None:
        sums = CountSum() if step % 2 == 0 else UnsettledSum()

        def run(micro_batch: int) -> None:
            self.net(data(step, micro_batch)).square().sum().backward()
            sums.count()
            self.ran.append((step, micro_batch))

        gradients.begin()
        self.operation = operation = GradientStep(range(MICRO_BATCHES), gradients, sums, run)
        self.engine.run(operation)
        assert sums.bucket.reduced.item() == sums.total == MICRO_BATCHES
        assert sums.settled == (MICRO_BATCHES if step % 2 else 0)
        gradients.install([True] * 4)
        with torch.no_grad():
            for parameter in self.net.parameters():
                assert parameter.grad is not None
                parameter -= 0.05 * parameter.grad
        self.results.append([float(p.detach().sum()) for p in self.net.parameters()])

    def _evaluate(self, step: int) -> None:
        finished: set[int] = set()

        def run(number: int) -> None:
            self.evaluated.append((step, number))
            finished.add(number)

        def todo(reports: ReportSum, rank: int) -> list[int]:
            return plan_rows(range(4), reports.finished, rank, reports.world).rows

        operation = Evaluation(todo, run, finished, lambda: b",".join(b"%d" % n for n in sorted(finished)))
        parts = unpack_parts(self.engine.run(operation))
        numbers = sorted(int(n) for part in parts for n in part.split(b",") if n)
        assert numbers == list(range(4)), "every batch evaluated once"
        self.engine.run(WriteFile(lambda _: ""))


def simulate(
    faults: dict[str, int], world: int = 3, joiners: Sequence[str] = (), seed: int = 0, steps: int = STEPS
) -> tuple[Coordinator, dict[str, Program], dict[str, Fault]]:
    """Run a task of ``world`` founders, some of which die at their n-th fault point."""
    coordinator = Coordinator(seed)
    names = [f"w{rank}" for rank in range(world)]
    programs = [(name, Program(coordinator.worker(name), steps=steps)) for name in names]
    programs += [(name, Program(coordinator.worker(name, joiner=True), joiner=True, steps=steps)) for name in joiners]
    placed = {name: Fault(at) for name, at in faults.items()}
    for name, program in programs:
        if name in placed:
            program.engine.fault = placed[name]
    coordinator.start()
    results = run_threads(coordinator, programs)
    for name, result in results.items():
        assert not isinstance(result, Killed) or placed[name].point is not None
        assert not isinstance(result, TaskIsOver) or name in joiners or name in coordinator.dismissed
    return coordinator, dict(programs), placed


def reference(steps: int = STEPS) -> Program:
    return Program(Engine(None, None, lambda world: None, False), steps=steps)()  # type: ignore[arg-type]


REFERENCE = reference()


def check(coordinator: Coordinator, programs: dict[str, Program], faults: dict[str, Fault]) -> None:
    """The three promises: exact, nothing finished is recomputed, positions differ by at most one."""
    survivors = [p for p in programs.values() if p.finished]
    assert survivors
    for program in survivors:
        assert len(program.results) == len(REFERENCE.results)
        for mine, expected in zip(program.results[:-1], REFERENCE.results[:-1], strict=True):
            assert mine == pytest.approx(expected, rel=1e-12, abs=1e-12)
        assert max(Counter(program.ran).values(), default=1) == 1, "a finished micro-batch was computed again"
        assert max(Counter(program.evaluated).values(), default=1) == 1
    for positions in coordinator.positions:
        assert max(positions) - min(positions) <= 1
    twice = [place for place, n in Counter(place for p in survivors for place in p.ran).items() if n > 1]
    assert twice == [], "two survivors computed the same micro-batch"


def test_a_world_of_one_without_an_agent() -> None:
    assert Counter(REFERENCE.ran) == Counter((s, m) for s in range(STEPS) for m in range(MICRO_BATCHES))


@pytest.mark.parametrize("world", [1, 2, 3, 5, 7])
def test_without_failures(world: int) -> None:
    coordinator, programs, faults = simulate({}, world)
    check(coordinator, programs, faults)
    ran = Counter(place for program in programs.values() for place in program.ran)
    assert ran == Counter(REFERENCE.ran)


def test_a_death_at_every_fault_point() -> None:
    """Worker 0, the first rank, dies at its first, second, third... fault point, until it survives the program."""
    points, at = set(), 1
    while True:
        coordinator, programs, faults = simulate({"w0": at}, seed=at)
        check(coordinator, programs, faults)
        point = faults["w0"].point
        if point is None:
            break
        points.add(point[0])
        at += 1
    assert points == {
        "exchange",
        "connect",
        "agree",
        "micro_batch",
        "launched",
        "reduced",
        "commit",
        "committed",
        "evaluated",
        "checkpoint",
    }
    assert at > 30


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    faults=st.dictionaries(st.sampled_from(["w0", "w1", "w2", "w3"]), st.integers(1, 90), max_size=3),
    seed=st.integers(0, 1000),
)
def test_random_deaths(faults: dict[str, int], seed: int) -> None:
    """Up to three of four workers die, perhaps while the others recover."""
    check(*simulate(faults, world=4, seed=seed))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    faults=st.dictionaries(st.sampled_from(["w0", "w1", "j0", "j1"]), st.integers(1, 90), max_size=3),
    seed=st.integers(0, 1000),
)
def test_random_deaths_with_joiners(faults: dict[str, int], seed: int) -> None:
    """Joiners may be admitted at any step, die during the transfer or outlive the founders; w2 lives."""
    check(*simulate(faults, world=3, joiners=["j0", "j1"], seed=seed))


@pytest.mark.parametrize("seed", range(5))
def test_a_joiner_takes_over_state_and_position(seed: int) -> None:
    coordinator = Coordinator(seed=seed)
    programs = {name: Program(coordinator.worker(name, name == "j0"), name == "j0") for name in ("w0", "w1", "j0")}

    def wait_for_the_joiner(*point: Any) -> None:
        if point[0] != "micro_batch":
            return
        with coordinator.condition:
            asked = coordinator.condition.wait_for(lambda: coordinator.epoch and coordinator.epoch.kind == "join", 10)
        assert asked, "the joiner never got ready"

    programs["w0"].engine.fault = wait_for_the_joiner
    coordinator.start()
    run_threads(coordinator, list(programs.items()))
    check(coordinator, programs, {})
    assert len(programs["j0"].ran) > 0


@pytest.mark.parametrize("at", [5, 12, 15, 20, 25])
def test_a_hold_ends_when_a_joiner_comes(at: int) -> None:
    """Below the minimum the members wait at a boundary, even if another one dies meanwhile."""
    coordinator = Coordinator(minimum=3)
    programs = {name: Program(coordinator.worker(name), steps=5) for name in ("w0", "w1", "w2")}
    programs["w0"].engine.fault, programs["w1"].engine.fault = Fault(at), Fault(at + 3)
    worlds: list[int] = []

    def late(name: str) -> Program:
        with coordinator.condition:
            assert coordinator.condition.wait_for(lambda: coordinator.epoch and coordinator.epoch.hold, 10)
        programs[name] = Program(coordinator.worker(name, joiner=True), joiner=True, steps=5)
        return programs[name]()

    def count(*point: Any) -> None:
        if point[0] == "committed":
            worlds.append(programs["w2"].engine.world.size)

    programs["w2"].engine.fault = count
    coordinator.start()
    founders = list(programs.items())
    run_threads(coordinator, [*founders, ("j0", lambda: late("j0")), ("j1", lambda: late("j1"))])
    expected = reference(5).results
    for name in ("w2", "j0", "j1"):
        for mine, theirs in zip(programs[name].results[:-1], expected[:-1], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-12, abs=1e-12)
    assert worlds[-1] >= 3
    assert sum(size < 3 for size in worlds) <= 2, "at most the steps that the failures broke were finished below it"


LAST = 4
"""The last of a step's buckets, with the small sums; before it are three of gradients, and the count."""


@pytest.mark.parametrize(
    ("at", "reduced", "launched", "recomputed"),
    [
        (("commit", 0), LAST + 1, [], []),  # the dead rank's part is in each bucket
        (("launched", 0, LAST - 1), LAST, [LAST], [0, 3]),  # its loss and logged values are in none
    ],
)
def test_nothing_is_recomputed_once_the_last_bucket_is_complete(
    at: tuple[Any, ...], reduced: int, launched: list[int], recomputed: list[int]
) -> None:
    """The first of three ranks dies when the others have as many buckets; two micro-batches are its own."""
    coordinator = Coordinator()
    programs = {name: Program(coordinator.worker(name), steps=1) for name in ("w0", "w1", "w2")}
    others = [programs["w1"], programs["w2"]]
    again: dict[str, list[int]] = {"w1": [], "w2": []}

    def have_reduced() -> bool:
        operations = [getattr(program, "operation", None) for program in others]
        return all(each is not None and len(each._reduced) == reduced for each in operations)

    def note(name: str) -> Any:
        def fault(*point: Any) -> None:
            if point[0] == "launched" and programs[name].engine.world.size == 2:
                again[name].append(point[2])

        return fault

    programs["w0"].engine.fault = LateFault(at, have_reduced)
    for name in again:
        programs[name].engine.fault = note(name)
    coordinator.start()
    assert isinstance(run_threads(coordinator, list(programs.items()))["w0"], Killed)
    for name, program in programs.items():
        if name in again:
            assert program.operation.recomputed == recomputed
            assert program.results[0] == pytest.approx(REFERENCE.results[0], rel=1e-12, abs=1e-12)
    assert list(again.values()) == [launched] * 2, "a bucket that is complete is not reduced again"
    ran = Counter(micro_batch for program in programs.values() for _, micro_batch in program.ran)
    assert [micro_batch for micro_batch in sorted(ran) if ran[micro_batch] == 2] == recomputed
    assert ran.total() == MICRO_BATCHES + len(recomputed)


def test_no_micro_batch_is_lost_when_all_but_one_die_in_one_step() -> None:
    coordinator, programs, faults = simulate({"w0": 8, "w1": 9}, world=3)
    check(coordinator, programs, faults)
    assert programs["w2"].engine.world.size == 1


def test_programs_that_differ_are_noticed() -> None:
    """After a failure the survivors are at operations with different names."""
    coordinator = Coordinator()
    engines = {name: coordinator.worker(name) for name in ("w0", "w1", "w2")}
    engines["w2"].fault = Fault(3)

    def program(name: str) -> Any:
        kind = "left" if name == "w0" else "right"
        return lambda: engines[name].run(Agreement(kind, lambda rank: b""))

    coordinator.start()
    with pytest.raises(ProgramsDiffer, match="rank 0 in 'left', rank 1 and 1 more in 'right'"):
        run_threads(coordinator, [(name, program(name)) for name in engines])
    for engine in engines.values():
        engine.close()


@pytest.mark.parametrize("wanted", [("w0",), ("w0", "w1"), ("w0", "w1", "w2")])
def test_a_stop_that_not_all_members_want_gives_way_to_their_step(wanted: tuple[str, ...]) -> None:
    coordinator = Coordinator()
    engines = {name: coordinator.worker(name) for name in ("w0", "w1", "w2")}

    def program(name: str) -> tuple[bool, bool]:
        engine = engines[name]
        gradients, sums = GradientBuckets(net().named_parameters(), 32, overlap=True), CountSum()
        agreed = bool(engine.run(Agreement(STOP, lambda rank: b"stop"))) if name in wanted else False
        engine.wants_stop = name in wanted and not agreed
        gradients.begin()
        engine.run(GradientStep([], gradients, sums, lambda micro_batch: None))
        gradients.close()
        return agreed, engine.stops

    coordinator.start()
    results: dict[str, tuple[bool, bool]] = {}
    run_threads(coordinator, [(name, lambda name=name: results.update({name: program(name)})) for name in engines])
    unanimous = len(wanted) == 3
    assert set(results.values()) == {(unanimous, not unanimous)}
    for engine in engines.values():
        engine.close()


def test_a_file_is_written_by_another_when_its_writer_dies() -> None:
    coordinator = Coordinator()
    engines = {name: coordinator.worker(name) for name in ("w0", "w1")}
    acted: list[str] = []
    engines["w0"].fault = Fault(4)  # exchange, connect, "checkpoint", then "agree", after its action

    def program(name: str) -> Any:
        def act(_: Sequence[bytes]) -> str:
            acted.append(name)
            return name

        return lambda: engines[name].run(WriteFile(act))

    coordinator.start()
    results = run_threads(coordinator, [(name, program(name)) for name in engines])
    assert isinstance(results["w0"], Killed) and acted == ["w0", "w1"]
    assert results["w1"] == b"w1"
    for engine in engines.values():
        engine.close()


def test_a_communicator_that_is_built_too_late_is_closed() -> None:
    """A death between go and connect: the constructor would block on the dead peer."""
    coordinator = Coordinator()
    engines = {name: coordinator.worker(name) for name in ("w0", "w1")}
    release, built = threading.Event(), []
    connect = coordinator._connect

    def slow(epoch: Any, rank: int, world: int) -> Any:
        communicator = connect(epoch, rank, world)
        if epoch.number == 1:
            assert release.wait(20)
            built.append(communicator)
        return communicator

    engines["w1"]._connect = slow
    engines["w0"].fault = Fault(2)
    coordinator.start()
    results = run_threads(
        coordinator,
        [(name, lambda e=engine: e.run(Agreement("a", lambda rank: b"x"))) for name, engine in engines.items()],  # type: ignore[misc]
    )
    assert results["w1"] is not None and engines["w1"].world.epoch == 2
    release.set()
    for thread in threading.enumerate():
        if thread.name.startswith("unicron-connect"):
            thread.join(5)
    assert built and built[0]._reason == "closed"
    for engine in engines.values():
        engine.close()
