"""Hung ranks, found by comparing members' reports; one report for any number of symptoms; slow tasks and ranks."""

from __future__ import annotations

from typing import Any

import pytest
from coordinator.driver import World, restart, running
from coordinator.fake_agent import FakeAgent
from hypothesis import given
from hypothesis import strategies as st

from unicron_lightning import wire
from unicron_lightning.coordinator import hangs
from unicron_lightning.coordinator.hangs import NOTHING, Verdict, hopeless, judge
from unicron_lightning.coordinator.membership.workers import behind
from unicron_lightning.worker.control import activity

TIMES: dict[str, Any] = {"mute_time": 5.0, "collective_time": 10.0, "stall_time": 600.0}
PLACES = ("data", "compute", "reduce", "commit", "optimizer", "hooks", "validation", "checkpoint")


def does(
    worker: str, phase: str = "reduce", *, waiting: bool = True, overdue: bool = True, **about: Any
) -> wire.ActivityReport:
    fields: dict[str, Any] = {"epoch": 1, "step": 7, "seconds": 1.0, "limit": 0.5, **about}
    return wire.ActivityReport(worker=worker, phase=phase, waiting=waiting, overdue=overdue, **fields)


@given(
    size=st.integers(2, 9),
    culprit=st.integers(0, 8),
    places=st.lists(st.sampled_from(PLACES), min_size=9, max_size=9),
    overdue=st.lists(st.booleans(), min_size=9, max_size=9),
    silent=st.sets(st.integers(0, 8)),
    asked=st.floats(0, 4.9),
)
def test_any_phases_with_one_culprit_name_it(
    size: int, culprit: int, places: list[str], overdue: list[bool], silent: set[int], asked: float
) -> None:
    culprit %= size
    members = [f"w{rank}" for rank in range(size)]
    said = {
        name: does(name, places[rank], waiting=rank != culprit, overdue=rank == culprit or overdue[rank])
        for rank, name in enumerate(members)
        if rank == culprit or rank not in silent
    }
    verdict = judge(members, said, reachable=frozenset(members), asked=asked, **TIMES)
    assert verdict == (Verdict(culprits=(f"w{culprit}",)) if len(said) > 1 else NOTHING)


def test_who_is_elsewhere_and_has_time_left_is_waited_for() -> None:
    members = ["a", "b", "c"]
    said = {"a": does("a"), "b": does("b"), "c": does("c", "data", waiting=False, overdue=False)}
    assert judge(members, said, reachable=frozenset(members), asked=100.0, **TIMES) == NOTHING


def test_where_nobody_waits_nobody_is_held_up() -> None:
    said = {name: does(name, "compute", waiting=False) for name in "ab"}
    assert judge(["a", "b"], said, reachable=frozenset("ab"), asked=1.0, **TIMES) == NOTHING
    said["a"] = does("a", "compute", waiting=False, seconds=601.0)
    assert judge(["a", "b"], said, reachable=frozenset("ab"), asked=1.0, **TIMES).culprits == ("a",)


def test_without_a_witness_who_is_late_has_failed_once_all_have_answered() -> None:
    rule: dict[str, Any] = {**TIMES, "witness": False, "reachable": frozenset("ab")}
    late, fine = does("a", "compute", waiting=False), does("b", "compute", waiting=False, overdue=False)
    assert judge(["a"], {"a": late}, asked=0.0, **rule) == Verdict(culprits=("a",), unnamed=True)
    assert judge(["a", "b"], {"a": late}, asked=1.0, **rule) == NOTHING, "the other may be waiting"
    assert judge(["a", "b"], {"a": late}, asked=5.0, **rule) == Verdict(culprits=("a",), unnamed=True)
    assert judge(["a", "b"], {"a": late, "b": fine}, asked=1.0, **rule) == Verdict(culprits=("a",), unnamed=True)
    assert judge(["a", "b"], {"a": late, "b": does("b")}, asked=1.0, **rule) == Verdict(culprits=("a",))
    assert judge(["a", "b"], {"a": fine, "b": fine}, asked=9.0, **rule) == NOTHING


@pytest.mark.parametrize("phase", ["hooks", "data", "validation", "epoch_end", "checkpoint", "boundary"])
def test_without_a_witness_a_long_hook_of_all_ranks_has_not_failed(phase: str) -> None:
    """Only a step is compared with an average: all workers were killed after 60 s in hooks, with the task's state."""
    said = {name: does(name, phase, waiting=False, seconds=61.0, limit=60.0) for name in "ab"}
    rule: dict[str, Any] = {**TIMES, "witness": False, "reachable": frozenset("ab")}
    assert judge(["a", "b"], said, asked=9.0, **rule) == NOTHING
    said["b"] = does("b")
    assert judge(["a", "b"], said, asked=9.0, **rule) == Verdict(culprits=("a",))
    said = {name: does(name, phase, waiting=False, seconds=601.0) for name in "ab"}
    assert judge(["a", "b"], said, asked=9.0, **rule) == Verdict(culprits=("a", "b"))


def test_a_failed_step_without_a_witness_is_an_error_without_a_name() -> None:
    world = World(witness=False)
    (agent,) = running(world, 1)
    agent.say(does(agent.worker(), "compute", epoch=world.task().number, waiting=False))
    (order,) = agent.all(wire.Inspect)
    assert order.kind == "unnamed_software_error"
    world.advance(3)  # its agent records no stacks
    report = world.event("error_reported").fields
    assert (report["kind"], report["severity"], report["worker"]) == ("unnamed_software_error", "SEV2", order.worker)
    assert [message.worker for message in agent.all(wire.Fence)] == [order.worker]


def test_who_does_not_answer_has_no_thread_left_that_runs() -> None:
    said = {"a": does("a")}
    for asked, reachable, culprits in ((4.0, "ab", ()), (6.0, "a", ()), (6.0, "ab", ("b",))):
        verdict = judge(["a", "b"], said, reachable=frozenset(reachable), asked=asked, **TIMES)
        assert verdict.culprits == culprits


def test_members_that_wait_in_different_operations_or_for_ended_programs_wait_in_vain() -> None:
    def said(*reports: tuple[float, int, str]) -> dict[str, wire.ActivityReport]:
        return {
            f"w{rank}": does(f"w{rank}", waits=waits, position=position, operation=name)
            for rank, (waits, position, name) in enumerate(reports)
        }

    members, apart = ["w0", "w1"], said((1.0, 3, "barrier"), (2.0, 3, "step"))
    assert hopeless(members, apart, finished=False) == "the members wait in different operations: 'barrier' and 'step'"
    assert not hopeless([*members, "w2"], apart, finished=False), "w2 may be on its way"
    for reports in (
        said((1.0, 3, "barrier"), (0.5, 3, "step")),  # not for long enough
        said((1.0, 3, "barrier"), (1.0, 4, "step")),  # a result is on its way
        said((9.0, 3, "step"), (9.0, 3, "step")),
        said((9.0, 3, "step"), (9.0, 3, "")),  # a worker of an older version
    ):
        assert not hopeless(members, reports, finished=False)
    alone = said((4.0, 9, "barrier"))
    assert hopeless(["w0"], alone, finished=True) == "the members wait in 'barrier' for workers whose program has ended"
    assert not hopeless(["w0"], alone, finished=False)
    assert not hopeless(["w0"], said((3.9, 9, "barrier")), finished=True)


def all_say(world: World, agents: tuple[FakeAgent, ...], culprit: FakeAgent | None, times: int = 1) -> None:
    """Report the symptoms of all: the others wait for the culprit."""
    for _ in range(times):
        for agent in agents:
            about = {"waiting": agent is not culprit, "phase": "reduce" if agent is not culprit else "compute"}
            agent.say(does(agent.worker(), epoch=world.task().number, **about))


def hang_report(order: wire.Inspect, at: float) -> wire.ErrorReport:
    about = {"cause": order.cause, "phase": order.phase, "step": order.step}
    details = {**order.details, "stacks": "File train.py"}
    return wire.ErrorReport(worker=order.worker, kind="task_hang", at=at, details=details, **about)  # type: ignore[arg-type]


def test_all_symptoms_one_report(trained: tuple[World, tuple[FakeAgent, ...]]) -> None:
    world, agents = trained
    culprit = agents[1]
    all_say(world, agents, culprit, times=3)
    assert all(agent.all(wire.ActivityQuery) for agent in agents)
    (order,) = culprit.all(wire.Inspect)
    assert order.worker == culprit.worker() and "micro" not in order.cause and order.phase == "compute"
    assert not any(agent.all(wire.Inspect) for agent in agents if agent is not culprit)
    culprit.say(hang_report(order, world.now))
    assert culprit.last(wire.Fence).worker == order.worker
    all_say(world, agents, culprit, times=2)  # sent before the others received it
    culprit.die()
    world.advance(30)
    (report,) = [event for event in world.events if event.name == "error_reported"]
    assert (report.fields["kind"], report.fields["worker"], report.fields["rank"]) == ("task_hang", order.worker, 1)
    assert report.fields["details"]["stacks"] and report.incident == "i1"
    assert world.task().incidents == 1 and len(culprit.all(wire.Inspect)) == 1


def test_an_agent_without_stacks_does_not_hold_up_the_others(trained: tuple[World, tuple[FakeAgent, ...]]) -> None:
    world, agents = trained
    all_say(world, agents, agents[2])
    world.advance(3)
    assert world.event("error_reported").fields["worker"] not in world.task().workers
    assert agents[2].all(wire.Fence)


def test_all_in_a_collective_is_a_time_out_and_answered_in_place(
    trained: tuple[World, tuple[FakeAgent, ...]],
) -> None:
    world, agents = trained
    number = world.task().number
    all_say(world, agents, None)
    world.advance(9)
    all_say(world, agents, None)
    assert world.task().number == number
    world.advance(3)
    assert world.event("error_reported").fields["kind"] == "nccl_timeout"
    assert world.task().number == number + 1 and len(world.task().members()) == 3
    assert not any(agent.all(wire.Fence) for agent in agents)


def test_who_does_not_answer_is_only_restarted_if_its_process_runs(
    trained: tuple[World, tuple[FakeAgent, ...]],
) -> None:
    world, agents = trained
    for _ in range(12):
        all_say(world, agents[:2], None)
        world.advance(1)
    orders = agents[2].all(wire.Inspect)
    assert len(orders) > 1 and all(order.silent for order in orders), "asked again: it may be slow"
    assert not orders[0].patient and orders[-1].patient, "to compute is a hang later only"
    assert "error_reported" not in world.names()
    agents[2].say(hang_report(orders[-1], world.now))
    assert world.event("error_reported").fields["worker"] == orders[-1].worker


@pytest.mark.parametrize(
    ("phase", "gentle"), [("validation", [False]), ("checkpoint", [True, False]), ("epoch_end", [True, False])]
)
def test_between_steps_only_a_silent_process_that_is_frozen_hangs(
    phase: str, gentle: list[bool], trained: tuple[World, tuple[FakeAgent, ...]]
) -> None:
    world, agents = trained
    for _ in range(12):
        for agent in agents[:2]:
            agent.say(does(agent.worker(), phase, epoch=world.task().number))
        world.advance(1)
    orders = agents[2].all(wire.Inspect)
    assert {order.phase for order in orders} == {phase} and all(order.silent for order in orders)
    assert not any(order.patient for order in orders), "a checkpoint or a batch may compute for long"
    assert list(dict.fromkeys(order.gentle for order in orders)) == gentle
    agents[2].say(does(agents[2].worker(), phase, epoch=world.task().number, overdue=False))
    world.advance(60)
    assert "error_reported" not in world.names() and world.task().number == 1, "all in a collective: it may be large"


def test_who_writes_a_checkpoint_and_answers_is_waited_for(trained: tuple[World, tuple[FakeAgent, ...]]) -> None:
    world, agents = trained
    for _ in range(60):
        for agent in reversed(agents):  # the one that writes answers the question that follows from the others' words
            waiting = agent is not agents[0]
            agent.say(does(agent.worker(), "checkpoint", epoch=1, waiting=waiting, overdue=waiting))
        world.advance(1)
    assert not any(agent.all(wire.Inspect) for agent in agents)
    assert "error_reported" not in world.names() and world.task().number == 1


def test_a_worker_that_goes_on_is_forgiven(trained: tuple[World, tuple[FakeAgent, ...]]) -> None:
    world, agents = trained
    number = world.task().number
    for agent in agents[:2]:
        agent.say(does(agent.worker(), epoch=number))
    agents[2].say(does(agents[2].worker(), "data", epoch=number, waiting=False, overdue=False))
    world.advance(5)
    for agent in agents:
        agent.say(does(agent.worker(), epoch=number, overdue=False))
    world.advance(60)
    assert "error_reported" not in world.names() and world.task().number == number
    assert not world.task().watch.since


def test_a_restarted_coordinator_hears_of_it_again(trained: tuple[World, tuple[FakeAgent, ...]]) -> None:
    world, agents = trained
    for agent in agents[:2]:
        agent.say(does(agent.worker(), epoch=world.task().number))
    restart(world, *agents)
    world.advance(1)
    assert not any(agent.all(wire.Inspect) for agent in agents)
    all_say(world, agents, agents[2])
    assert agents[2].all(wire.Inspect)


def pace(busy: float, slowdown: float = 1.0) -> wire.Pace:
    return wire.Pace(steps=100, median=0.06, usual=0.05, busy=busy, slowdown=slowdown)


def test_a_slow_task_and_a_slow_rank_are_shown_after_a_while(trained: tuple[World, tuple[FakeAgent, ...]]) -> None:
    world, agents = trained

    def tell(times: float, slowdown: float, seconds: int) -> None:
        for second in range(seconds):
            for agent, factor in zip(agents, (1.0, times, 1.0), strict=True):
                about = {"worker": agent.worker(), "metrics": {}, "pace": pace(0.01 * factor, slowdown)}
                agent.say(wire.Progress(step=100 + second, **about))  # type: ignore[arg-type]
            world.advance(1)

    tell(2.0, 1.3, 5)
    tell(1.0, 1.0, 2)
    tell(2.0, 1.3, 5)
    assert not {"straggler", "task_degraded"} & set(world.names()), "not for a while"
    tell(2.0, 1.3, 10)
    straggler = world.event("straggler").fields
    assert (straggler["worker"], straggler["rank"], straggler["times"]) == (agents[1].worker(), 1, 2.0)
    assert world.event("task_degraded").fields["times"] == 1.3
    tell(1.0, 1.0, 2)
    assert world.names().count("straggler") == world.names().count("straggler_over") == 1
    assert world.names().count("task_degraded") == world.names().count("task_normal") == 1


def test_both_ends_mean_the_same_phases_between_steps() -> None:
    assert set(hangs.BETWEEN) == activity.BETWEEN and set(hangs.STEP) == activity.CORE


def test_behind_its_peers() -> None:
    assert behind({"a": 1.0, "b": 1.1, "c": 0.9, "d": 1.5}, 1.25) == {"d": 1.5}
    assert behind({"a": 1.0, "b": 2.0}, 1.25) == {"b": 2.0}
    assert behind({"a": 1.0}, 1.25) == {}


@pytest.fixture
def trained() -> tuple[World, tuple[FakeAgent, ...]]:
    world = World()
    return world, tuple(running(world, 3))
