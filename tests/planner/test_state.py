"""States contain the allocation, refuse impossible values, and change by events."""

from __future__ import annotations

import dataclasses

import pytest
from planner.situations import cluster, task

from unicron_lightning.planner.state import ClusterState, NodesJoined, TaskFinished, TaskLaunched, WorkersLost


@pytest.fixture
def state() -> ClusterState:
    tasks = [task(name, range(20)) for name in ("a", "b")]
    queue = [task("q", range(20))]
    return cluster(tasks, 10, 4, queued=queue, allocation={"a": 5, "b": 3}, node_workers=4)


def test_a_loss_keeps_what_tasks_had_and_says_what_they_lost(state: ClusterState) -> None:
    after = state.after(WorkersLost(num_workers=4, by_task={"b": 2}))
    assert (after.num_workers, dict(after.allocation), dict(after.lost)) == (6, {"a": 5, "b": 3}, {"b": 2})
    assert (after.pivot, state.num_idle, after.num_idle) == ("b", 2, 0)


def test_losses_add_up_until_a_plan_is_adopted(state: ClusterState) -> None:
    twice = state.after(WorkersLost(num_workers=1, by_task={"a": 1})).after(
        WorkersLost(num_workers=2, by_task={"a": 1, "b": 1})
    )
    assert (dict(twice.lost), twice.num_workers) == ({"a": 2, "b": 1}, 7)
    adopted = twice.adopt({"a": 4, "b": 0})
    assert (dict(adopted.allocation), dict(adopted.lost), adopted.pivot) == ({"a": 4}, {}, None)


def test_joining_finishing_and_launching(state: ClusterState) -> None:
    assert state.after(NodesJoined(num_workers=3)).num_workers == 13
    ended = state.after(TaskFinished(task="a"))
    assert (ended.names, dict(ended.allocation), ended.num_idle) == (("b",), {"b": 3}, 7)
    launched = state.after(TaskLaunched(task="q"))
    assert (launched.names, launched.queued, launched.pivot) == (("a", "b", "q"), (), "q")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a", WorkersLost(num_workers=4, by_task={"a": 4})),
        ("b", WorkersLost(num_workers=4, by_task={"b": 3})),  # a node with one idle worker
        (None, WorkersLost(num_workers=2)),
    ],
)
def test_a_nodes_loss(state: ClusterState, name: str | None, expected: WorkersLost) -> None:
    assert state.loss_of(name) == expected


def test_who_has_nothing_loses_nothing(state: ClusterState) -> None:
    assert state.after(TaskLaunched(task="q")).loss_of("q") is None
    assert dataclasses.replace(state, num_workers=8).loss_of(None) is None


def test_what_follows_keeps_the_quantum(state: ClusterState) -> None:
    after = (
        state.after(WorkersLost(num_workers=4, by_task={"a": 2}))
        .after(TaskLaunched(task="q"))
        .after(TaskFinished(task="a"))
    )
    assert after.quantum_flop == state.quantum_flop


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_workers": -1}, "num_workers=-1"),
        ({"num_workers": 7}, "num_workers=7: expected at least the 8 that tasks have"),
        ({"num_workers": 15}, "the curve of 'a' is for units of 1 and 14 workers: expected .* at least 15"),
        ({"unit": 0}, "unit=0"),
        ({"unit": 2}, "expected units of 2"),
        ({"node_workers": -1}, "node_workers=-1"),
        ({"quantum_flop": -1.0}, "quantum_flop=-1.0"),
        ({"allocation": {"c": 1}}, r"allocation names \['c'\]: expected only tasks \['a', 'b'\]"),
        ({"allocation": {"q": 1}}, r"allocation names \['q'\]"),
        ({"allocation": {"a": -1}}, "allocation={'a': -1}"),
        ({"lost": {"c": 1}}, r"lost names \['c'\]"),
        ({"lost": {"a": 6}}, "'a' lost 6 workers: expected at most 5"),
        ({"running_seconds": 0.0}, r"running_seconds\(10\) is 0.0"),
        ({"running_seconds": lambda n: float("inf")}, r"running_seconds\(10\) is inf"),
        ({"queued": "tasks"}, r"tasks \['a', 'a', 'b', 'b'\]: expected different names"),
    ],
)
def test_wrong_values_are_quoted(state: ClusterState, change: dict, message: str) -> None:
    if change.get("queued") == "tasks":
        change = {"queued": state.tasks}
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(state, **change)


@pytest.mark.parametrize(
    "event",
    [
        TaskFinished(task="q"),
        TaskLaunched(task="a"),
        WorkersLost(num_workers=1, by_task={"q": 1}),
        WorkersLost(num_workers=11),
    ],
)
def test_what_cannot_happen_is_refused(state: ClusterState, event: object) -> None:
    with pytest.raises(ValueError, match="expected"):
        state.after(event)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_workers": 0}, "at least one"),
        ({"num_workers": 2, "by_task": {"a": 3}}, "the tasks lose 3 workers, expected at most 2"),
        ({"num_workers": 2, "by_task": {"a": 0}}, "of each named task"),
        ({"num_workers": 2, "by_task": (("a", 1), ("a", 1))}, "each task once"),
    ],
)
def test_losses_that_cannot_be(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WorkersLost(**arguments)


def test_joining_takes_somebody() -> None:
    with pytest.raises(ValueError, match="num_workers=0"):
        NodesJoined(num_workers=0)


def test_a_running_time_that_depends_on_the_workers() -> None:
    state = cluster([task("a", range(9))], 4, running_seconds=lambda n: 100.0 / n)
    assert state.duration_seconds == 25.0
    assert state.running_seconds_with(0) == 100.0  # without workers: that of one
