"""The planner behind the machine's questions: answers, and answers computed in advance."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unicron_lightning.coordinator import events as ev
from unicron_lightning.coordinator.allocation.answers import Knowledge, Planning, event_between, keep
from unicron_lightning.coordinator.events import Competitor, Question
from unicron_lightning.planner.performance.model import SublinearModel
from unicron_lightning.planner.state import NodesJoined, TaskFinished, WorkersLost
from unicron_lightning.terms import Terms

KNOWN = Knowledge(
    performances={name: SublinearModel(rate=1e12) for name in "abc"},
    running_seconds=lambda places: 86_400.0 / places,
    transition_seconds=lambda task: 5.0,
)


def task(name: str, places: int, *, lost: int = 0, weight: float = 1.0, low: int = 1, high: int = 4) -> Competitor:
    return Competitor(
        name=name,
        terms=Terms(weight=weight, min_workers=low, max_workers=high, may_pause=False),
        runs=places > 0,
        before=places,
        left=places - lost,
    )


def on(task: Competitor, **terms: object) -> Competitor:
    """The task on other terms."""
    return replace(task, terms=replace(task.terms, **terms))


def situation(num_places: int, *tasks: Competitor, key: str = "k") -> Question:
    return Question(key=key, num_places=num_places, node_places=1, tasks=tasks)


class Asked:
    """A planner in its thread, asked one question after the other."""

    def __init__(self) -> None:
        self.planning = Planning()
        self._answers: queue.Queue[ev.Planned] = queue.Queue()

    def __call__(self, question: Question, known: Knowledge = KNOWN) -> ev.Planned:
        self.planning.ask(question, known, self._answers.put)
        return self._answers.get(timeout=60)


@pytest.fixture
def ask() -> Iterator[Asked]:
    asked = Asked()
    yield asked
    asked.planning.close()


def test_the_heavier_task_has_more(ask: Asked) -> None:
    answer = ask(situation(6, task("a", 0, weight=2.0), task("b", 0)))
    assert answer.allocation == {"a": 4, "b": 2}
    assert answer.key == "k"
    assert not answer.foreseen
    assert answer.waf > 0


def test_each_kind_of_nodes_has_a_plan_of_its_own(ask: Asked) -> None:
    """A task that no node can run has no place; without a planner, too."""
    tasks = task("a", 0, high=9), task("b", 0, high=9), task("c", 0, high=9, weight=1.5), task("d", 0)
    known = replace(KNOWN, performances={name: SublinearModel(rate=1e12) for name in "abcd"})
    question = replace(situation(7, *tasks), parts=((4, frozenset("a")), (3, frozenset("bc"))))
    assert ask(question, known).allocation == {"a": 4, "b": 0, "c": 3, "d": 0}
    assert not ask(replace(question, num_places=6, parts=((4, frozenset("a")), (2, frozenset("bc")))), known).foreseen
    assert keep(question).allocation == {"a": 4, "b": 2, "c": 1, "d": 0}


def test_what_may_happen_next_is_planned_before(ask: Asked) -> None:
    ask(situation(6, task("a", 0, weight=2.0), task("b", 0)))
    answer = ask(situation(5, task("a", 4, lost=1, weight=2.0), task("b", 2)))
    assert (answer.allocation, answer.foreseen) == ({"a": 4, "b": 1}, True)
    answer = ask(situation(6, task("a", 4, weight=2.0), task("b", 1)))
    assert (answer.allocation, answer.foreseen) == ({"a": 4, "b": 2}, True)
    answer = ask(situation(6, task("b", 2)))
    assert (answer.allocation, answer.foreseen) == ({"b": 4}, True)


def test_of_equal_jobs_that_wait_the_first_submitted_one_is_next(ask: Asked) -> None:
    jobs = [replace(task(name, 0, high=1), since=float(number)) for number, name in enumerate("cab")]
    order = []
    while jobs:
        (started,) = (name for name, places in ask(situation(1, *jobs)).allocation.items() if places)
        order.append(started)
        running = [replace(job, runs=True, before=1, left=1) for job in jobs if job.name == started]
        ask(situation(1, *running, *(job for job in jobs if job.name != started)))
        jobs = [job for job in jobs if job.name != started]
    assert order == ["c", "a", "b"]


def test_the_end_of_a_task_starts_the_oldest_of_those_that_wait_as_planned_before(ask: Asked) -> None:
    ages = {"r": 5.0, "old": 2.0, "new": 7.0, "newest": 9.0}
    known = replace(KNOWN, performances={name: SublinearModel(rate=1e12) for name in ages})
    order, jobs = [], [replace(task(name, 0, high=1), since=since) for name, since in ages.items() if name != "r"]
    running = replace(task("r", 1, high=1), since=ages["r"])
    while jobs:
        ask(situation(1, running, *jobs), known)
        answer = ask(situation(1, *jobs), known)
        assert answer.foreseen
        (started,) = (name for name, places in answer.allocation.items() if places)
        order.append(started)
        (running,) = (replace(job, runs=True, before=1, left=1) for job in jobs if job.name == started)
        jobs = [job for job in jobs if job.name != started]
    assert order == ["old", "new", "newest"]


def test_the_launch_of_jobs_after_a_task_is_planned_before(ask: Asked) -> None:
    a, b, c = task("a", 4), task("b", 2, high=2), replace(task("c", 0), since=1.0)
    running = replace(situation(6, a, b), coming=(("a", (c,)),))
    ask(running)
    answer = ask(situation(6, b, c))
    assert (answer.allocation, answer.foreseen) == ({"b": 2, "c": 4}, True)
    ask(running)
    assert not ask(situation(6, b, on(c, weight=0.5))).foreseen, "the job is another one than expected"


def test_what_was_not_foreseen_is_planned_at_once(ask: Asked) -> None:
    ask(situation(6, task("a", 0, weight=2.0), task("b", 0)))
    answer = ask(situation(4, task("a", 4, lost=1, weight=2.0), task("b", 2, lost=1)))
    assert (sum(answer.allocation.values()), answer.foreseen) == (4, False)


def test_a_failure_of_the_planner_is_no_failure_of_the_next_question(ask: Asked) -> None:
    unknown = task("nobody knows it", 0)
    ask.planning.ask(situation(2, unknown), KNOWN, lambda answer: None)
    assert ask(situation(2, task("a", 0), task("b", 0))).allocation == {"a": 1, "b": 1}


@settings(max_examples=60, deadline=None)
@given(
    has=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 3)),
    spare=st.integers(0, 2),
    weights=st.tuples(*[st.sampled_from([0.5, 1.0, 3.0])] * 3),
    struck=st.integers(0, 3),
)
def test_plans_made_ahead_are_those_made_afresh(
    has: tuple[int, int, int], spare: int, weights: tuple[float, float, float], struck: int
) -> None:
    tasks = [task(name, places, weight=w) for name, places, w in zip("abc", has, weights, strict=True)]
    standing = situation(sum(has) + spare, *tasks)
    if struck < 3 and has[struck]:
        tasks[struck] = replace(tasks[struck], left=has[struck] - 1)
        after = situation(standing.num_places - 1, *tasks)
    else:
        after = situation(standing.num_places + 1, *tasks)
    asked, fresh = Asked(), Asked()
    try:
        asked.planning.plan_ahead(standing, KNOWN)
        foreseen = asked(after)
        again = fresh(after)
    finally:
        asked.planning.close()
        fresh.planning.close()
    assert foreseen.foreseen
    assert foreseen.waf == pytest.approx(again.waf), "as good, if perhaps not the same among equals"


def test_events_are_told_apart() -> None:
    a, b = task("a", 4), task("b", 2)
    standing = situation(7, a, b)
    assert event_between(standing, situation(6, replace(a, left=3), b)) == WorkersLost(
        num_workers=1, by_task=((a.plan_name, 1),)
    )
    assert event_between(standing, situation(6, a, b)) == WorkersLost(num_workers=1)
    assert event_between(standing, situation(8, a, b)) == NodesJoined(num_workers=1)
    assert event_between(standing, situation(7, b)) == TaskFinished(task=a.plan_name)
    assert event_between(standing, situation(7, a, b, task("c", 0))) is None
    assert event_between(standing, situation(6, on(a, weight=2.0), b)) is None
    assert event_between(standing, standing) is None


def test_of_equal_tasks_the_one_that_was_submitted_first_gets_the_place() -> None:
    planning, answers = Planning(), queue.Queue[ev.Planned]()
    try:
        waiting = [replace(task(name, 0, high=1), since=since) for name, since in (("a", 12.0), ("b", 3.5), ("c", 9.0))]
        planning.ask(situation(2, *waiting), KNOWN, answers.put)
        assert answers.get(timeout=60).allocation == {"a": 0, "b": 1, "c": 1}
    finally:
        planning.close()


def test_a_running_task_that_may_be_paused_makes_room_for_a_more_valuable_one(ask: Asked) -> None:
    low, high = task("a", 4), task("b", 0, weight=100.0, low=4)
    assert ask(situation(4, low, high)).allocation == {"a": 4, "b": 0}
    assert ask(situation(4, on(low, may_pause=True), high, key="k2")).allocation == {"a": 0, "b": 4}
