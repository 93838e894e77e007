"""The severity workflow by itself: failures that count, events that end a count, and events without effect."""

from __future__ import annotations

import pytest
from coordinator.severity.story import NODES, Story, connection_fails_again, no_way_past_a_step
from hypothesis import given, settings
from hypothesis import strategies as st

from unicron_lightning.coordinator.severity.record import Failure
from unicron_lightning.coordinator.severity.rules import Decision, FailureContext
from unicron_lightning.coordinator.severity.workflow import (
    Error,
    suspect,
)

# ---- SEV3


def test_a_step_finished_in_between_starts_the_count_of_reattempts_afresh() -> None:
    story = Story()
    for step in range(1, 20):
        story.disconnect()
        story.settle(step - 1)
        story.finished(step)
    assert set(story.actions()) == {"reattempt"}


def test_reattempts_long_ago_do_not_count() -> None:
    story = Story()
    for _ in range(10):
        story.disconnect()
        story.now += 150
    assert set(story.actions()) == {"reattempt"}


def test_the_suspect_is_restarted_and_the_count_begins_anew() -> None:
    story = connection_fails_again()
    assert story.actions() == [*["reattempt"] * 3, "escalate", "restart"]
    restart = story.all[-1]
    assert restart.error is not None
    assert (restart.error.agent, restart.error.kind) == ("b", "keeps_failing")
    assert story.disconnect()[0].action == "reattempt"


@pytest.mark.parametrize(("named", "blamed"), [("", "c"), ("a", "a"), ("ab", "b"), ("aab", "a"), ("abc", "c")])
def test_the_suspect_is_named_most_often_or_else_the_last(named: str, blamed: str) -> None:
    story = Story()
    for agent in named:
        story.named(agent)
    found = suspect(story.record, FailureContext(members=tuple((node, node) for node in NODES)))
    assert found is not None
    assert found[0] == blamed
    assert found[2].startswith("named" if len(set(named)) in (1, 2) and named != "ab" else "unknown")


def test_without_a_suspect_sev3_is_tried_in_place_again() -> None:
    story = Story(reattempt_limit=0)
    story.nodes = ""
    assert [decision.action for decision in story.disconnect()] == ["reattempt"]


def test_the_same_suspect_again_and_again_is_cordoned() -> None:
    story = Story()
    for _ in range(16):
        story.named("b")
        story.disconnect()
    assert story.actions().count("restart") == 3
    assert story.all[-1].action == "cordon"


# ---- SEV2


def test_failures_with_progress_between_never_cordon_or_stop() -> None:
    story = Story()
    for number in range(200):
        story.now += 3.6
        story.fail_and_return("abc"[number % 3], 10 * (number + 1))
    assert set(story.actions()) == {"restart"}
    assert story.record.series == {}


def test_a_worker_that_lasts_ends_its_nodes_series() -> None:
    story = Story()
    for number in range(12):
        step = 10 * number
        story.settle(step)
        if number % 4 == 3:
            story.finished(step + 5)
        story.fail_and_return("b", story.record.step)
    assert set(story.actions()) == {"restart"}


def test_a_sibling_that_trains_on_does_not_excuse_the_accelerator_beside_it() -> None:
    """Two agents share node b: one fails whenever it has joined, the other one was present before and stays."""
    story = Story()
    story.settled(0, {"a": "a", "b0": "b", "b1": "b"})
    step = 0
    for number in range(5):
        failure = Failure(kind="exited_abnormally", node="b", agent="b1", worker="b1", cause="exit 1", at=story.now)
        story.see(Error(failure=failure, round=number))
        story.settled(step, {"a": "a", "b0": "b"})
        step += 10
        story.finished(step)
        story.settled(step, {"a": "a", "b0": "b", "b1": "b"})
    assert "cordon" in story.actions()


def test_failures_long_ago_do_not_cordon() -> None:
    story = Story()
    for number in range(20):
        story.now += 1300
        story.fail_and_return("b", 10 + 2 * number)
    assert "cordon" not in story.actions()


def test_a_node_that_never_gets_a_worker_ready_is_cordoned() -> None:
    story = Story()
    story.settled(0, {"a": "a", "c": "c"})
    for number in range(4):
        story.start_fails("b", training=True)
        story.finished(10 * number)
    assert story.actions() == [*["restart"] * 3, "cordon"]


def test_workers_killed_by_others_before_they_are_members_say_nothing_of_the_node() -> None:
    story = Story()
    for number in range(20):
        story.start_fails("b", training=True, sent=True)
        story.finished(10 * number)
    assert "cordon" not in story.actions()


def test_siblings_that_fail_in_one_round_count_once() -> None:
    story = Story()
    for _ in range(20):
        failure = Failure(kind="exited_abnormally", node="b", agent="b", worker="b?", at=story.now)
        story.see(Error(failure=failure, round=5, training=True))
    assert story.actions() == ["restart"]


def test_a_script_that_fails_everywhere_costs_no_node() -> None:
    story = no_way_past_a_step()
    assert "cordon" not in story.actions()


@pytest.mark.parametrize(("kind", "action"), [("gradients_differ", "restart"), ("exited_abnormally", "cordon")])
def test_gradients_that_differ_count_for_no_node(kind: str, action: str) -> None:
    story = Story()
    for number in range(3):
        story.fail_and_return("b", 2 * number, kind)
    story.fail("b")
    story.settle(5, without="b")
    assert story.actions() == [*["restart"] * 3, action]


def test_where_one_node_is_to_blame_it_goes_and_the_task_gets_another_chance() -> None:
    story = Story(spared="b")
    for _ in range(4):
        story.fail("b")
        story.settle(0)
    assert story.actions() == [*["restart"] * 3, "cordon"]
    assert story.record.attempts == 0


def test_where_the_node_to_blame_is_needed_the_task_is_stopped_with_its_name() -> None:
    story = Story(spared="")
    for _ in range(5):
        story.fail("b")
        story.settle(0)
    stop = story.all[-1]
    assert stop.action == "stop"
    assert stop.facts["nodes"] == ["b"]
    assert [d.facts["withheld"] for d in story.all if d.rule == "needed node keeps failing"] == ["cordon"] * 2


def test_members_that_do_not_report_in_time_are_restarted() -> None:
    story = Story()
    decisions = story.overdue("b", "c")
    assert [(d.action, d.error.agent, d.error.kind) for d in decisions if d.error] == [
        ("restart", "b", "recovery_stuck"),
        ("restart", "c", "recovery_stuck"),
    ]


def test_a_task_that_is_stuck_again_and_again_is_stopped() -> None:
    story = Story(spared="")
    for _ in range(5):
        story.overdue("a", "b")
        story.settle(0)
    assert story.all[-1].rule == "no way past a step"


# ---- the paper's rules

PAPER = {"strict": True, "reattempt_limit": 1, "cordon_failures": 2}


def test_by_the_paper_one_renewal_and_one_restart_and_then_isolation() -> None:
    story = Story(spared="", **PAPER)
    for _ in range(3):
        story.disconnect()
    assert story.actions() == ["reattempt", "escalate", "restart", "escalate", "cordon"]
    assert {d.error.node for d in story.all[2:] if d.error} == {"c"}, "the suspect stays the same"


def test_by_the_paper_the_restart_of_a_worker_that_had_lasted_is_the_only_one() -> None:
    story = Story(spared="", **PAPER)
    story.fail_and_return("b", 10)
    story.fail_and_return("b", 11)
    assert story.actions() == ["restart", "cordon"]


def test_by_the_paper_a_restart_that_helps_ends_the_escalation() -> None:
    story = Story(spared="", **PAPER)
    for number in range(20):
        story.fail_and_return("b", 10 * (number + 1))
    assert set(story.actions()) == {"restart"}


def test_by_the_paper_agents_of_one_node_that_fail_together_count_once() -> None:
    story = Story(spared="", **PAPER)
    story.settled(0, {"a": "a", "b0": "b", "b1": "b"})
    story.finished(10)
    for agent in ("b0", "b1"):
        failure = Failure(kind="exited_abnormally", node="b", agent=agent, worker=agent, cause="exit 1", at=story.now)
        story.see(Error(failure=failure))
    story.settled(10, {"a": "a"})
    assert story.actions() == ["restart", "restart"]


def test_by_the_paper_a_lost_node_may_come_back() -> None:
    story = Story(spared="", **PAPER)
    for number in range(5):
        story.fail_and_return("b", 10 * (number + 1), "lost_connection", gone="b")
    assert set(story.actions()) == {"isolate"}


# ---- the crash loop


def test_the_diagnosis_says_where_how_often_and_why() -> None:
    stop = no_way_past_a_step().all[-1]
    assert stop.action == "stop"
    assert stop.facts["step"] == 7
    assert stop.facts["attempts"] == 5
    assert sorted(stop.facts["nodes"]) == ["a", "b", "c"]
    assert stop.facts["causes"] == ["exit 1"]
    assert "exit 1" in stop.reason
    assert "5 times at step 7" in stop.reason


def test_one_step_of_progress_starts_the_count_afresh() -> None:
    story = Story()
    for step in range(1, 30):
        for _ in range(4):
            story.fail("a")
            story.new_life()
            story.settle(step - 1)
        story.finished(step)
    assert "stop" not in story.actions()


def test_failures_on_the_way_back_from_a_checkpoint_are_not_at_the_same_step() -> None:
    story = Story()
    story.finished(100)
    story.fail("a")
    story.new_life()
    for step in range(51, 80):
        story.settle(step - 1)
        story.finished(step)
        story.fail("b")
    story.settle(80)
    assert "stop" not in story.actions()


def test_lost_agents_are_no_crash_loop() -> None:
    story = Story(spared="")
    for _ in range(20):
        story.fail("a", "lost_connection", gone="a")
        story.new_life()
        story.settle(0)
    assert "stop" not in story.actions()


def test_a_node_that_fails_to_start_while_others_train_does_not_stop_the_task() -> None:
    story = Story(spared="")
    for _ in range(50):
        story.start_fails("b", training=True)
    assert "stop" not in story.actions()


# ---- whatever happens

ERRORS = st.one_of(
    st.tuples(st.just("fail"), st.sampled_from(NODES)),
    st.tuples(st.just("lose"), st.sampled_from(NODES)),
    st.tuples(st.just("start"), st.sampled_from(NODES)),
    st.tuples(st.just("disconnect"), st.just("")),
    st.tuples(st.just("overdue"), st.sampled_from(NODES)),
    st.tuples(st.just("broken"), st.sampled_from(NODES)),
)


def strike(story: Story, what: str, node: str) -> list[Decision]:
    """Cause one error, with all consequences up to the next settled epoch."""
    there = {member.node for member in story.record.joined.values()}
    match what:
        case "fail" | "lose" if node in there:
            decisions = story.fail(node, "exited_abnormally" if what == "fail" else "lost_connection")
        case "start":
            decisions = story.start_fails(node, training=True)
        case "overdue":
            decisions = story.overdue(node)
        case "broken":
            decisions = story.broken(node)
        case _:
            decisions = story.disconnect()
    return [*decisions, *story.settle(story.record.step)]


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(ERRORS, st.booleans()), max_size=60), st.sets(st.sampled_from(NODES)))
def test_nodes_that_are_needed_are_cordoned_only_if_broken_and_every_error_is_answered(history, spared) -> None:
    story = Story(spared="".join(spared))
    for (what, node), progress in history:
        decisions = strike(story, what, node)
        assert decisions, "an error without an answer"
        cordons = [d for d in decisions if d.action == "cordon" and d.rule != "node is broken"]
        assert all(d.error.node in spared for d in cordons if d.error is not None)
        if progress:
            story.finished(story.record.step + 1)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.lists(ERRORS, min_size=1, max_size=60))
def test_a_task_with_a_step_between_any_two_errors_is_never_stopped(history) -> None:
    story = Story()
    for what, node in history:
        strike(story, what, node)
        story.finished(story.record.step + 1)
    assert "stop" not in story.actions()
    assert "escalate" not in story.actions()


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.lists(st.sampled_from(NODES), min_size=5, max_size=5))
def test_a_task_that_fails_at_a_step_for_good_is_stopped(nodes) -> None:
    story = Story(spared="")
    for node in nodes:
        strike(story, "fail", node)
    assert story.all[-1].action == "stop"


def test_a_lost_agent_that_is_back_before_it_is_judged_is_welcome() -> None:
    story = Story()
    decisions = story.fail("b", "lost_connection") + story.settle(10, without="b")
    assert "cordon" not in [decision.action for decision in decisions], decisions
    assert "isolate" in [decision.action for decision in decisions]
