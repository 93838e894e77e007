"""An exception that a retry raises again ends the task; a transient one is retried."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
from coordinator.driver import FakeAgent, World, running, started
from coordinator.severity.story import NODES, Story
from coordinator.severity.test_apply import answer, come_back, progress, settle_all
from coordinator.severity.test_reports import events, exits, report

from unicron_lightning import wire
from unicron_lightning.coordinator.severity.apply import fault_of

FRAMES = ["/srv/u/train.py:9 <module>", "/srv/u/train.py:3 step", "/x/site-packages/torch/nn/linear.py:125 forward"]


def told(kind: str = "other_software_error", **fields: Any) -> wire.ErrorReport:
    given: dict[str, Any] = {"worker": "a/0#1", "cause": "it broke", "phase": "compute", "step": 5, "at": 1.0}
    given |= {"ends": True, "details": {"type": "KeyError", "message": "'x'", "frames": FRAMES}}
    return wire.ErrorReport(kind=kind, **{**given, **fields})


def test_a_fault_of_the_program_is_known_by_type_place_and_step():
    fault = fault_of(told(), "other_software_error")
    assert fault == "KeyError in linear.py:125 forward, called by train.py:3 step, after step 5"
    elsewhere = [frame.replace("/srv/u", "/mnt/other") for frame in FRAMES]
    assert fault_of(told(details={"type": "KeyError", "frames": elsewhere}), "other_software_error") == fault
    assert fault_of(told(step=6), "other_software_error") != fault
    assert fault_of(told(details={"type": "ValueError", "frames": FRAMES}), "other_software_error") != fault


@pytest.mark.parametrize("kind", ["out_of_memory", "ecc_error", "storage_error", "connection_failed", "cuda_error"])
def test_what_machines_and_networks_do_is_none(kind: str):
    assert fault_of(told(kind), kind) == ""


@pytest.mark.parametrize("details", [{}, {"frames": []}, {"frames": "x"}, {"frames": None, "type": 3}])
def test_a_report_without_a_traceback_is_none(details: dict[str, Any]):
    assert fault_of(told(details=details), "other_software_error") == ""


def live(story: Story, faults: list[str], step: int = 7) -> None:
    """Live a life that ends by these faults, one of each node."""
    story.finished(step)
    for node, fault in zip(NODES, faults, strict=True):
        story.fail(node, "other_software_error", fault=fault)
    story.new_life()
    story.settle(0)


def test_members_that_fail_alike_one_after_the_other_are_one_try():
    story = Story()
    story.finished(7)
    for number, node in enumerate(NODES):
        story.fail(node, "other_software_error", fault="f")
        if number < 2:
            story.settle(7, without="".join(NODES[: number + 1]))
    story.new_life()
    assert "stop" not in story.actions()
    story.settle(0)
    live(story, ["f", "f", "f"])
    assert story.rules()[-1] == "the program fails"


def test_other_faults_and_progress_in_between_are_no_repetition():
    story = Story()
    live(story, ["f", "f", "f"])
    live(story, ["g", "", ""])
    assert "stop" not in story.actions()
    story.finished(8)
    live(story, ["f", "f", "f"], step=8)
    assert "stop" not in story.actions()


def test_one_agents_rounds_before_anybody_trains_are_tries_of_it_alone():
    story = Story()
    story.new_life()
    for node in NODES:
        story.start_fails(node, "other_software_error", training=False, fault="f")
    assert "stop" not in story.actions()
    story.start_fails("b", "other_software_error", training=False, fault="f")
    assert story.rules()[-1] == "the program fails"


def test_a_joiners_wrong_setting_may_be_its_nodes_and_stops_nobody():
    story = Story()
    story.finished(7)
    story.start_fails("b", "config_error", training=True)
    assert "stop" not in story.actions()
    story.start_fails("b", "config_error", training=False)
    assert story.rules()[-1] == "a value is wrong"


def test_in_a_layout_on_trial_a_wrong_setting_is_the_layouts():
    story = Story()
    story.new_life()
    story.trial = True
    for _ in range(2):
        story.start_fails("b", "config_error", training=False)
    assert story.rules()[-1] == "no way into a layout"


def test_a_wrong_setting_before_the_hello_ends_the_task_everywhere():
    world = World()
    a, b = world.agent("a").start(), world.agent("b").start()
    report(a, "config_error", step=None, details={"type": "ConfigError", "frames": FRAMES})
    [stopped] = events(world, "task_stopped")
    assert stopped["reason"].splitlines() == ["a value is wrong: it broke", *(f"  at {frame}" for frame in FRAMES)]
    for agent in (a, b):
        assert [over.succeeded for over in agent.all(wire.TaskOver)] == [False]


def fails_in_validation(world: World, agent: FakeAgent, step: int, *, first: bool, **details: Any) -> None:
    details = {"type": "RuntimeError", "frames": FRAMES, **({"first": True} if first else {}), **details}
    report(agent, "other_software_error", details=details, step=step, phase="validation")
    exits(agent)


@pytest.mark.parametrize(
    ("second", "stops"),
    [({"first": True}, True), ({"first": False}, False), ({"first": True, "type": "KeyError"}, False)],
)
def test_a_worker_that_fails_in_its_first_validation_as_its_predecessor_did_ends_the_task(
    second: dict[str, Any], stops: bool
) -> None:
    world, (a, b) = started(2, nodes=(1, 4))
    settle_all(world, a, b)
    progress(a, 7)
    fails_in_validation(world, b, 7, first=False)  # a founder has validated before
    settle_all(world, a)
    come_back(b)
    settle_all(world, a, b)
    progress(a, 14)  # the others train on
    fails_in_validation(world, b, 14, **second)
    settle_all(world, a)
    stopped = events(world, "task_stopped")
    assert [event["rule"] for event in stopped] == (["the program fails"] if stops else [])
    if stops:
        assert "it broke (raised again, RuntimeError in linear.py:125 forward" in stopped[0]["reason"]
        assert FRAMES[1] in stopped[0]["reason"]


def test_a_member_that_raises_the_same_twice_ends_the_task_with_the_traceback():
    world = World()
    [a] = running(world, 1)
    progress(a, 7)
    details = {"type": "KeyError", "message": "'x'", "frames": FRAMES}
    report(a, "other_software_error", details=details)
    exits(a)
    assert not events(world, "task_stopped")
    come_back(a)
    settle_all(world, a)
    report(a, "other_software_error", details=details)
    [stopped] = events(world, "task_stopped")
    assert stopped["rule"] == "the program fails"
    assert "it broke (raised again, KeyError in linear.py:125" in stopped["reason"]
    assert FRAMES[1] in stopped["reason"]


def recur(
    story: Story, failures: list[tuple[int, int]], nodes: str = "ab", place: str = "x.py:3", **about: str
) -> None:
    """Have members raise an exception.

    Args:
        story: of the task.
        failures: the finished steps at each failure, and those when its successor joins.
        nodes: the members' nodes in turn.
        place: of the exception.
        about: further facts about it.
    """
    for (step, join), node in zip(failures, cycle(nodes), strict=False):
        story.finished(step)
        given = {"cause": f"no batch at {step}", **about}
        story.fail(node, "other_software_error", place=place, step=step, **given)
        story.settle(step, without=node)
        story.settle(join)


@pytest.mark.parametrize(
    ("nodes", "failures", "found"),
    [
        ("ab", [(100, 103), (200, 204), (300, 302), (400, 409)], "every 100 steps"),
        ("b", [(1010, 1063), (1070, 1122), (1130, 1191), (1200, 1260)], "every 10 steps"),
        ("b", [(10, 63), (70, 122), (133, 191), (201, 260)], ""),
        ("b", [(400, 411), (1200, 1213), (2000, 2017), (2400, 2490)], ""),
        ("ab", [(57, 65), (100, 101), (157, 166), (200, 203), (257, 260)], ""),
        ("b", [(10_007, 10_020), (20_011, 20_020), (29_990, 30_000), (40_123, 40_130), (50_000, 50_007)], ""),
        ("ab", [(100, 103), (200, 204), (300, 302)], ""),
        ("ab", [(2, 2), (4, 4), (6, 6), (8, 8), (10, 10)], ""),
    ],
    ids=["rank 0", "the last rank", "irregular", "passed", "two in turns", "rare", "three", "soon"],
)
def test_an_exception_at_multiples_of_a_number_of_steps_ends_the_task(
    nodes: str, failures: list[tuple[int, int]], found: str
) -> None:
    story = Story()
    recur(story, failures, nodes)
    stops = [decision.reason for decision in story.all if decision.action == "stop"]
    assert len(stops) == bool(found)
    assert all(f"(raised again, x.py:3, {found})" in reason for reason in stops)


def test_an_exception_after_as_many_steps_of_each_worker_ends_the_task() -> None:
    story, joined = Story(nodes="a"), 0
    for away in (3, 9, 4, 5):
        story.finished(joined + 50)
        story.fail("a", "other_software_error", place="x.py:3", step=joined + 50)
        story.settle(joined + 50, without="a")
        assert "stop" not in story.actions() or away == 5
        joined += 50 + away
        story.settle(joined)
    assert "x.py:3, after 50 steps of each worker" in story.all[-1].reason


def test_regular_exceptions_that_differ_or_are_long_ago_end_nothing() -> None:
    for other in ({"place": "y.py:4"}, {"cause": "another text"}):
        story = Story()
        recur(story, [(100, 103), (200, 204), (300, 302)])
        recur(story, [(400, 403)], **other)
        assert "stop" not in story.actions()
        recur(story, [(500, 503)])
        assert "stop" not in story.actions()
    story = Story()
    for step in range(100, 1000, 100):
        recur(story, [(step, step + 4)])
        story.now += 1300.0
    assert "stop" not in story.actions()


def test_an_exception_on_one_rank_every_ten_steps_ends_the_task_with_its_traceback() -> None:
    world, (a, b) = started(2, nodes=(1, 4))
    settle_all(world, a, b)
    details = {"type": "RuntimeError", "frames": FRAMES}
    for step in (9, 19, 29, 39):
        assert not events(world, "task_stopped")
        progress(a, step - 1)  # the coordinator knows of one step less
        report(b, "other_software_error", details=details, step=step)
        exits(b)
        answer(world, a, step=step)
        if step < 39:
            come_back(b)
            progress(a, step + 4)
            settle_all(world, a, b)
    [stopped] = events(world, "task_stopped")
    assert "linear.py:125 forward, called by train.py:3 step, every 10 steps" in stopped["reason"]
    assert FRAMES[1] in stopped["reason"]
