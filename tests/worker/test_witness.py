"""Witnesses of gradients: who is wrong, and that a wrong rank's contribution never reaches the model."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from worker.simulation import Coordinator, Fault, Killed, run_threads

from unicron_lightning.data.loader import GlobalBatch
from unicron_lightning.errors import ConfigError, GradientsDiffer, SilentCorruption
from unicron_lightning.worker import codec
from unicron_lightning.worker.buckets import GradientBuckets
from unicron_lightning.worker.effects import Effects
from unicron_lightning.worker.engine import Engine, EpochChanged
from unicron_lightning.worker.exact_sums import ExactGradients
from unicron_lightning.worker.step import GradientStep
from unicron_lightning.worker.sums import SumsLayout
from unicron_lightning.worker.witness import (
    AGAIN,
    Judgement,
    Witness,
    WitnessedStep,
    in_doubt,
    judge,
    together,
)

MICRO_BATCHES = 5
STEPS = 8
RIGHT = 7


# ---- the decision


def steady(*wrong: int) -> Judgement:
    return Judgement(wrong=wrong, steady=True)


@pytest.mark.parametrize(
    ("runs", "verdict"),
    [
        ([[1, 1, 1], [1, 1, 1]], steady()),
        ([[2, 1, 1], [1, 1, 1]], steady(0)),
        ([[1, 1, 1], [1, 1, 2]], steady(1)),
        ([[1, 1, 1], [2, 3, 4]], steady(1)),
        ([[1, 1, 1], [2, 2, 2]], steady()),
        ([[1, 1, 1], [2, 2, 2], [1, 1]], steady(1)),
        ([[1, 1, 1], [2, 2, 2], [3, 3]], steady()),
        ([[1, 1, 1], [2, 3, 4], [5, 6]], steady(1, 2)),
        ([[1, 1, 1], [2, 2, 2], [5, 6]], steady()),
        ([[1, 1, 1], [2, 2, 2], [1, 1], [2, 2]], steady()),
        ([[1, 1, 1], [2, 2, 2], [1, 1], [1, 1], [2, 2]], steady(1, 4)),
        ([[1, 2, 3], [4, 5, 6]], Judgement(wrong=(), steady=False)),
        ([[1, 2, 3], [4, 5, 6], [7, 8]], Judgement(wrong=(), steady=False)),
    ],
)
def test_who_is_wrong(runs: list[list[int]], verdict: Judgement) -> None:
    assert judge(dict(enumerate(runs))) == verdict


@given(
    ranks=st.integers(2, 7),
    broken=st.sets(st.integers(0, 6)),
    seed=st.integers(0, 10_000),
    runs=st.integers(2, 4),
)
def test_a_right_rank_is_never_blamed(ranks: int, broken: set[int], seed: int, runs: int) -> None:
    """Whatever broken ranks compute, as long as more than half of those that look steady are right."""
    chance = random.Random(seed)
    broken &= set(range(ranks))
    found = {r: [chance.choice([RIGHT, 1, 2, 3]) if r in broken else RIGHT for _ in range(runs)] for r in range(ranks)}
    lying = [r for r in broken if len(set(found[r])) == 1 and found[r][0] != RIGHT]
    right = [r for r in found if {*found[r]} == {RIGHT}]
    verdict = judge(found)
    if len(lying) < len(right):
        assert set(verdict.wrong) == {r for r in found if {*found[r]} != {RIGHT}}
    elif right:
        assert verdict.steady


def test_a_replica_has_the_runs_of_all_its_workers() -> None:
    assert together([{1: [5], 2: [6]}, {1: [7], 2: [8]}]) == {1: [(5, 7)], 2: [(6, 8)]}
    assert together([{1: [5, 6]}, {1: [7]}]) == {1: [(6, 7)]}, "the first of them was interrupted by a failure"
    assert together([{1: [5]}, {}]) == {}, "one was a spare"
    assert judge({0: [(1, 2)], 1: [(1, 3)], 2: [(1, 2)]}) == steady(1)


@pytest.mark.parametrize(
    ("holders", "rank", "repeated"),
    [
        (["ab", "cd", "ef"], 0, 12),  # as planned
        (["ab", "ef"], 0, 12),  # of the following present replica
        (["ab", "ef"], 1, 10),
        (["ab", "cx"], 0, None),  # a worker that was a spare has no plan
        (["ab", "cx"], 1, None),
        (["ab", "cf"], 1, None),  # nor have workers of two replicas one together
    ],
)
def test_what_a_replica_repeats_after_a_failure(holders: list[str], rank: int, repeated: int | None) -> None:
    """All of its workers the same, whichever of them has come how far."""
    begun, repetitions = ["ab", "cd", "ef"], []
    steps = {
        worker: WitnessedStep(Witness(1, compare=True), 1, gradients(net()), repetitions.append) for worker in "abcdefx"
    }
    for place, replica in enumerate(begun):
        for worker in replica:
            steps[worker].plan_together(begun, place, lambda place: [10 + place], [None, None])
    reports = [steps[worker].report() if worker != "x" else None for worker in holders[rank]]
    for worker in holders[rank]:
        steps[worker].plan_together(holders, rank, lambda place: [20 + place], reports)
    assert [steps[worker]._other for worker in holders[rank]] == [repeated, repeated]


@pytest.mark.parametrize("done", [(), (0,), (1,), (0, 1)])
def test_a_row_is_repeated_again_unless_all_of_a_replica_have_repeated_it(done: tuple[int, ...]) -> None:
    """A cut may meet a worker behind its last exchange with its partners, and the partners before theirs."""
    rows: list[int] = []
    steps = [WitnessedStep(Witness(1, compare=True), 1, gradients(net()), rows.append) for _ in range(2)]
    engine = SimpleNamespace(check=lambda: None, activity=SimpleNamespace(repeated=lambda: None))
    for step in steps:
        step.plan_together(["ab", "cd"], 0, lambda place: [10 + place], [None, None])
    for place in done:
        steps[place].repeat(engine)  # type: ignore[arg-type]
    assert rows == [11] * len(done)
    reports = [step.report() for step in steps]
    for step in steps:
        step.plan_together(["ab", "cd"], 0, lambda place: [20 + place], reports)
        step.repeat(engine)  # type: ignore[arg-type]
    assert rows == [11] * len(done) + ([] if len(done) == 2 else [11, 11])


def test_workers_that_met_a_failure_before_and_in_a_step_repeat_nothing() -> None:
    """One has planned for a world that its partner has not seen; in no further attempt do they plan."""
    steps = [WitnessedStep(Witness(1, compare=True), 1, gradients(net()), lambda row: None) for _ in range(2)]
    steps[0].plan_together(["ab", "cd", "ef"], 0, lambda place: [10 + place], [None, None])
    for _ in range(2):
        reports = [step.report() if step._planned is not None else None for step in steps]
        for step in steps:
            step.plan_together(["ab", "cd"], 0, lambda place: [20 + place], reports)
        assert [(step.own, step._other) for step in steps] == [(None, None)] * 2


def test_micro_batches_in_doubt() -> None:
    assert in_doubt([{3: [1], 4: [5]}, {3: [2], 4: [5]}, {}]) == [3]
    assert in_doubt([{3: [1, 2]}]) == [3]
    assert in_doubt([{3: [1]}, {4: [2]}]) == []


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_each_pair_of_ranks_meets(ranks: int) -> None:
    """In size - 1 steps with a witness in a row, and over more all micro-batches of a share are repeated."""
    shares = [list(range(rank, 3 * ranks, ranks)) for rank in range(ranks)]
    met, repeated = set(), set()
    for number in range(3, 3 * (3 * (ranks - 1)) + 1, 3):
        owners = []
        for rank in range(ranks):
            step = WitnessedStep(Witness(3, compare=True), number, gradients(net()), lambda m: None)
            step.plan(rank, ranks, shares.__getitem__)
            assert step.own in shares[rank]
            other = step._other
            assert other is not None and other not in shares[rank]
            owners.append(other % ranks)
            met.add((rank, other % ranks))
            repeated.add(other)
        assert sorted(owners) == list(range(ranks)), "each rank has a witness"
    assert len(met) == ranks * (ranks - 1)
    assert len(repeated) == 3 * ranks


@pytest.mark.parametrize("every", [-1, 1.5, True, "3"])
def test_wrong_numbers_of_steps(every: Any) -> None:
    with pytest.raises(ConfigError, match=f"witness_every={every!r}: expected"):
        Witness(every, compare=True)


def test_workers_of_different_kinds_would_be_blamed() -> None:
    with pytest.raises(ConfigError, match="witness_every=3 with compare=False"):
        Witness(3, compare=False)


def test_which_steps_have_a_witness() -> None:
    made = gradients(net())
    found = [Witness(3, compare=True).of_step(done, made, lambda m: None) is not None for done in range(7)]
    assert found == [False, False, True, False, False, True, False]
    assert Witness(0, compare=False).of_step(2, made, lambda m: None) is None
    assert Witness(None, compare=False).of_step(2, made, lambda m: None) is None


# ---- gradients


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def gradients(module: nn.Module, kind: type[GradientBuckets] = GradientBuckets) -> GradientBuckets:
    return kind(module.named_parameters(), 32, overlap=True)


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_that_were_set_aside_add_up_as_autograd_adds_them(sparse: bool) -> None:
    def run(apart: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module = nn.ModuleList([nn.Embedding(6, 3, sparse=sparse), nn.Linear(3, 1)])
        made = gradients(module)
        for number in range(3):
            with made.apart(adds=True) if apart else nullcontext():
                module[1](module[0](torch.tensor([number, 2]))).square().sum().backward()
            for fails in (False, True) if apart else ():
                with suppress(EpochChanged), made.apart(adds=fails):
                    module[1](module[0](torch.tensor([4, 5]))).sum().backward()
                    if fails:
                        raise EpochChanged("a member has failed")
        return [each.to_dense() for each in made.present().values()]

    for one, other in zip(run(apart=True), run(apart=False), strict=True):
        assert torch.equal(one, other)


def test_a_repeated_micro_batch_leaves_no_changes_also_if_a_failure_ends_it() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3))
    module.register_buffer("seen", torch.zeros(()))
    effects = Effects(module, None)
    effects.begin(0, SumsLayout(), anew=True)
    effects.start_micro_batch()

    def runs() -> None:
        module(torch.randn(4, 3))
        module.seen.add_(1)  # type: ignore[operator]

    runs()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with suppress(EpochChanged), effects.dropped():
        effects.start_micro_batch()
        assert module.seen == 0
        runs()
        raise EpochChanged("a member has failed")
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name


# ---- steps


def data(step: int, micro_batch: int) -> torch.Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(100 * step + micro_batch)).double()


class Uncounted:
    """A `Sums` without any."""

    buckets: Sequence[Any] = ()

    def totals(self) -> list[float]:
        return [0.0]

    def read(self, totals: Sequence[float]) -> bool:
        return False

    def settle(self, engine: Engine) -> None:
        raise AssertionError("nothing to settle")


Corrupt = Callable[[int, int, int], bool]
"""Whether a worker's calculation is wrong, given the step, the micro-batch and the number of its calls so far."""


class Program:
    """A training with a witness, whose worker may compute wrong gradients.

    Args:
        engine: of the worker.
        every: of the witness.
        corrupt: whether the worker is wrong.
        same: whether it is wrong in the same way each time.
        streams: whether samples come from streams, of which a worker keeps what it has read in a step.
        sample: makes the samples of a micro-batch, given the step and its number.
    """

    def __init__(
        self,
        engine: Engine,
        every: int,
        corrupt: Corrupt,
        *,
        same: bool = False,
        streams: bool = False,
        sample: Callable[[int, int], Any] = data,
    ) -> None:
        self.engine, self.net = engine, net()
        self.error: BaseException | None = None
        self.losses: list[float] = []
        self.ran: list[tuple[int, int]] = []
        self.calls = 0
        self.finished = False
        self.witness = Witness(every, compare=True)
        self._corrupt, self._same = corrupt, same
        self._streams, self._sample = streams, sample
        self.read: dict[tuple[int, int], Any] = {}

    def __call__(self) -> Program:
        made = gradients(self.net)
        try:
            for step in range(STEPS):
                self.engine.step = step
                self._step(step, made)
        except (SilentCorruption, GradientsDiffer, ConfigError) as error:
            self.error = error
            raise Killed from error
        finally:
            made.close()
            self.engine.close()
        self.finished = True
        return self

    def _batch(self, step: int) -> GlobalBatch:
        def read(micro_batch: int) -> Any:
            place = (step, micro_batch)
            return self.read.setdefault(place, self._sample(*place)) if self._streams else self._sample(*place)

        stand_in = {"stand_in": read} if self._streams else {}
        return GlobalBatch(0, step, range(MICRO_BATCHES), read, lambda _: 2, **stand_in)

    def _backward(self, batch: GlobalBatch, micro_batch: int) -> None:
        step = batch.step
        self.calls += 1
        samples = batch.fetch(micro_batch)
        loss = self.net(samples.clone()).square().sum()
        samples.zero_()  # as a script may do
        if self._corrupt(step, micro_batch, self.calls):
            loss = loss * (1.0 + 0.5 ** (40 if self._same else 10 + self.calls % 30))
        loss.backward()

    def _step(self, step: int, made: GradientBuckets) -> None:
        batch = self._batch(step)

        def run(micro_batch: int) -> None:
            self._backward(batch, micro_batch)
            self.ran.append((step, micro_batch))

        made.begin()
        witness = self.witness.of_step(step, made, lambda micro_batch: self._backward(batch, micro_batch), batch)
        operation = GradientStep(range(MICRO_BATCHES), made, Uncounted(), run, witness=witness)
        self.engine.run(operation)
        made.install([True] * 4)
        with torch.no_grad():
            for parameter in self.net.parameters():
                assert parameter.grad is not None
                parameter -= 0.05 * parameter.grad


def never(*_: int) -> bool:
    return False


def alone() -> list[torch.Tensor]:
    program = Program(Engine(None, None, lambda world: None, False), 1, never)()  # type: ignore[arg-type]
    return [p.detach() for p in program.net.parameters()]


EXPECTED = alone()


def simulate(
    world: int, corrupt: dict[str, Corrupt], every: int = 1, deaths: dict[str, int] | None = None, **options: Any
) -> dict[str, Program]:
    coordinator = Coordinator(seed=world)
    names = [f"w{rank}" for rank in range(world)]
    programs = {name: Program(coordinator.worker(name), every, corrupt.get(name, never), **options) for name in names}
    for name, at in (deaths or {}).items():
        programs[name].engine.fault = Fault(at)
    coordinator.start()
    run_threads(coordinator, list(programs.items()))
    return programs


def check(programs: dict[str, Program]) -> None:
    """Survivors have the parameters of a run without faults, and have computed no micro-batch of theirs twice."""
    survivors = [program for program in programs.values() if program.finished]
    assert survivors
    for program in survivors:
        for one, other in zip(program.net.parameters(), EXPECTED, strict=True):
            torch.testing.assert_close(one.detach(), other, rtol=1e-12, atol=1e-12)
        assert max(Counter(program.ran).values(), default=1) == 1
        assert not program.read or program.read.keys() >= {*program.ran}, "what a wrong rank has read was used"


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3, 5, 7])
def test_without_faults_nothing_happens(world: int, every: int, streams: bool) -> None:
    programs = simulate(world, {}, every, streams=streams)
    check(programs)
    assert all(program.finished for program in programs.values())
    assert all(not streams or program.read.keys() == {*program.ran} for program in programs.values())
    calls = sum(program.calls for program in programs.values())
    repeats = 0 if world == 1 else min(world, MICRO_BATCHES) * (STEPS // every)
    assert calls == STEPS * MICRO_BATCHES + repeats


def test_without_an_option_there_is_no_message_more() -> None:
    sent: list[int] = []
    for every in (0, STEPS + 1):
        coordinator = Coordinator()
        programs = {name: Program(coordinator.worker(name), every, never) for name in ("w0", "w1")}
        coordinator.start()
        run_threads(coordinator, list(programs.items()))
        sent.append(len(coordinator.hubs[1].calls))
    assert sent[0] == sent[1] == STEPS * 5  # three buckets, the totals, and a vote
    check(programs)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("world", [3, 4, 5])
def test_a_rank_that_is_always_wrong_ends_before_it_contributes(world: int, same: bool, streams: bool) -> None:
    programs = simulate(world, {"w1": lambda step, m, call: step >= 2}, same=same, streams=streams)
    check(programs)
    error = programs["w1"].error
    assert isinstance(error, SilentCorruption)
    assert str(error).startswith("rank 1 on node w1 (host ")
    assert "device cpu), last found right 1 steps before, has computed a wrong gradient in step 3" in str(error)
    assert error.suspect["steps_since_right"] == 1 and error.suspect["last_right"] == 2
    assert [name for name, program in programs.items() if program.error] == ["w1"]


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("wrong", [4, 5, 6, 7, 8])
def test_one_wrong_call(world: int, wrong: int) -> None:
    """It is found if it hits the contribution that is repeated, or the repetition."""
    programs = simulate(world, {"w0": lambda step, m, call: call == wrong})
    error = programs["w0"].error
    assert [name for name, program in programs.items() if program.error] == (["w0"] if error else [])
    assert error is None or isinstance(error, SilentCorruption)
    if error is not None:
        check(programs)


def test_two_of_three_are_wrong() -> None:
    programs = simulate(3, dict.fromkeys(["w0", "w2"], lambda step, m, call: step >= 1))
    check(programs)
    assert [name for name, each in programs.items() if each.finished] == ["w1"]


def test_of_two_ranks_the_one_that_differs_from_itself_is_found() -> None:
    programs = simulate(2, {"w0": lambda step, m, call: step >= 3})
    check(programs)
    assert isinstance(programs["w0"].error, SilentCorruption) and programs["w1"].finished


def test_two_ranks_that_agree_with_themselves_only_end_both() -> None:
    programs = simulate(2, {"w0": lambda step, m, call: step >= 3}, same=True)
    for program in programs.values():
        assert isinstance(program.error, GradientsDiffer)
        assert "in step 4 the gradients of micro-batches" in str(program.error)


def test_a_script_that_never_repeats_itself_is_refused() -> None:
    programs = simulate(3, dict.fromkeys(["w0", "w1", "w2"], lambda step, m, call: True))
    for program in programs.values():
        assert isinstance(program.error, ConfigError) and "witness_every=1: in step 1" in str(program.error)


def test_ranks_that_are_all_wrong_are_not_blamed() -> None:
    """As if samples had other bits in the processes that make the ranks' own micro-batches."""
    programs = simulate(3, dict.fromkeys(["w0", "w1", "w2"], lambda step, m, call: call == 1), same=True)
    for program in programs.values():
        assert isinstance(program.error, GradientsDiffer), program.error


def test_the_gradient_of_the_one_micro_batch_is_compared() -> None:
    """Not that which its owner has accumulated."""
    module = net()
    made = gradients(module, ExactGradients)
    step = WitnessedStep(Witness(1, compare=True), 1, made, lambda m: module(data(0, m)).square().sum().backward())
    module(data(0, 1)).square().sum().backward()
    step.observe(step._repeat, 3)
    engine = Engine(None, None, lambda world: None, False)  # type: ignore[arg-type]
    before = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
    step._run_again(engine, 3)
    assert len(set(step._runs[3])) == 1 and len(step._runs[3]) == 2
    for was, parameter in zip(before, module.parameters(), strict=True):
        assert was is not None and parameter.grad is not None and torch.equal(was, parameter.grad)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    deaths=st.dictionaries(st.sampled_from(["w0", "w1", "w2", "w3"]), st.integers(1, 120), max_size=2),
    broken=st.sampled_from(["w0", "w1", "w2", "w3"]),
    first=st.integers(0, STEPS - 1),
    every=st.integers(1, 3),
    streams=st.booleans(),
)
def test_deaths_at_any_point_beside_a_wrong_rank(
    deaths: dict[str, int], broken: str, first: int, every: int, streams: bool
) -> None:
    """If the rank is found in the first step with a witness in which it is wrong, nothing of it is in the model.

    Deaths in that step may leave nothing to compare, since unfinished micro-batches are redistributed.
    """
    begins = -(-(first + 1) // every) * every - 1
    programs = simulate(4, {broken: lambda step, m, call: step >= begins}, every, deaths, streams=streams)
    survivors = {name: each for name, each in programs.items() if each.finished}
    error = programs[broken].error
    if survivors and isinstance(error, SilentCorruption) and error.suspect["step"] == begins + 1:
        assert {name for name, each in programs.items() if each.error} == {broken}
        check(survivors)


@pytest.mark.parametrize(("world", "victim"), [(3, 1), (3, 2), (4, 1), (4, 3)])
def test_samples_handed_by_a_rank_that_dies_are_read_again(
    monkeypatch: pytest.MonkeyPatch, world: int, victim: int
) -> None:
    """Also by the rank that was its witness, and has them, if no micro-batch was finished."""
    hand_over = WitnessedStep.hand_over
    given: set[tuple[str, int, int]] = set()
    all_have_them = Barrier(world)

    def hand_over_and_die(step: WitnessedStep, engine: Engine) -> None:
        hand_over(step, engine)
        if engine.world.size < world:
            return
        rank, control = engine.world.rank, engine.control
        given.update((engine.world.workers[rank], engine.step, number) for number in {*step._handed} - {step.own})
        if engine.step == 4:
            all_have_them.wait(30)
            if rank == victim:
                raise Killed
            assert control is not None
            with control.condition:
                assert control.condition.wait_for(lambda: control.failed_since(engine.world.epoch), 30)

    monkeypatch.setattr(WitnessedStep, "hand_over", hand_over_and_die)
    programs = simulate(world, {}, streams=True)
    survivors = {name: each for name, each in programs.items() if each.finished}
    assert len(survivors) == world - 1
    assert given & {(name, *place) for name, each in survivors.items() for place in each.ran}
    check(survivors)


def test_samples_in_doubt_are_those_of_the_rank_that_has_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of a witness, whose memory may be wrong: it would find its own runs, and those of others, right."""
    hand_over = WitnessedStep.hand_over

    def hand_over_and_change(step: WitnessedStep, engine: Engine) -> None:
        hand_over(step, engine)
        if engine.step == 2 and engine.world.rank == 2 and step._other is not None:
            step._handed[step._other] = codec.encode(2 * codec.decode(step._handed[step._other]))

    monkeypatch.setattr(WitnessedStep, "hand_over", hand_over_and_change)
    programs = simulate(3, {}, streams=True)
    assert [name for name, each in programs.items() if each.error] == ["w2"]
    check(programs)


def test_samples_of_streams_must_be_plain_data() -> None:
    programs = simulate(2, {}, streams=True, sample=lambda step, m: nn.Parameter(data(step, m)).to_sparse())
    errors = [program.error for program in programs.values() if program.error]
    assert errors
    for error in errors:
        assert isinstance(error, ConfigError)
        assert "witness_every=1 with iterable data: value is a torch.sparse_coo tensor" in str(error)


def test_runs_in_doubt_are_repeated_by_all() -> None:
    programs = simulate(3, {"w1": lambda step, m, call: step == 0}, every=1)
    twice = 2 * AGAIN
    others = [programs[name].calls for name in ("w0", "w2")]
    assert sum(others) == STEPS * MICRO_BATCHES + 2 + 2 * twice + 2 * (STEPS - 1)
