"""A worker's history from notices and its own events."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from unicron_lightning import wire
from unicron_lightning.callbacks.history import KEPT, History, in_words
from unicron_lightning.callbacks.monitor import TaskView, picture
from unicron_lightning.coordinator.incidents.facts import (
    PHASES,
    Bill,
    BrokenConnection,
    IncidentClosed,
    IncidentPhase,
    PhaseCost,
    WorkerDeath,
)


def notice(name: str, at: float, incident: str | None = None, **fields: Any) -> wire.Notice:
    return wire.Notice(name=name, at=at, incident=incident, fields=fields)


def death(at: float, incident: str, worker: str, cause: str, code: int | None = None) -> wire.Notice:
    fact = WorkerDeath(worker=worker, cause=cause, code=code, received_at=at)
    return notice(fact.event, at, incident, **fact.entry)


def bill(cause: str, *seconds: float) -> Bill:
    phases = zip(PHASES, seconds, strict=True)
    costs: dict[IncidentPhase, PhaseCost] = {
        phase: PhaseCost(seconds=each, worker_seconds=each, waf_seconds=None) for phase, each in phases
    }
    sizes = {"slots_before": 2, "workers_before": 2, "weight": 1.0, "flops_per_step": None}
    times = {"fault_at": 1.0, "known_at": 1.0, "stepped_at": 1.0}
    return Bill(cause=cause, failures=1, phases=costs, **sizes, **times)  # type: ignore[arg-type]


def failure(history: History, number: int) -> None:
    """Feed one incident from the death to the bill."""
    at, name = 100.0 * number, f"i{number}"
    history.take(death(at, name, "n1-abc/0#1", "signal", 9))
    history.take(death(at, name, "n1-abc/1#1", "sibling"))
    history.take(notice("worker.recovered", at + 0.25, epoch=2, step=7, world=1, recomputed=[3, 5]))
    closed = IncidentClosed(outcome="restored", closed_at=at + 5.0, bill=bill("signal", 0.001, 0.24, 4.0))
    history.take(notice(closed.event, at + 5.0, name, **closed.entry))


def test_an_incident_from_its_first_word_to_its_bill():
    history = History()
    failure(history, 1)
    (recovered, first), (closed, second) = history.news()
    assert (first, second) == ("recovered", "closed")
    assert (recovered.transition, recovered.outcome, recovered.recomputed) == (0.25, None, 2)
    assert (closed.cause, closed.where, closed.outcome) == ("signal", "n1-abc/0#1", "restored")
    assert (closed.detection, closed.transition, closed.sub_healthy) == (0.001, 0.24, 4.0)
    assert (history.count, history.recomputed, history.news()) == (1, 2, [])
    assert closed.line() == (
        "i1 signal n1-abc/0#1: restored, detection 1.0 ms, transition 240 ms, sub-healthy 4.0 s, "
        "2 micro-batches computed again"
    )


def test_a_death_explains_the_broken_connection_that_was_heard_of_first():
    history = History()
    broken = BrokenConnection(worker="n0-abc/0#1", epoch=1, error="collective failed")
    history.take(notice(broken.event, 10.0, "i1", **broken.entry))
    history.take(death(10.1, "i1", "n1-abc/1#1", "sibling"))  # explains nothing
    history.take(death(10.2, "i1", "n1-abc/0#1", "exit", 1))
    (seen,) = history.newest(3)
    assert (seen.cause, seen.where, seen.known_at) == ("exit", "n1-abc/0#1", 10.0)
    assert seen.line() == "i1 exit n1-abc/0#1: recovering"


def test_a_joiner_goes_on_with_the_others_history():
    members, joiner = History(), History()
    for number in range(1, 41):
        failure(members, number)
    state = members.state()
    failure(joiner, 40)  # it was present already when the last one was closed
    joiner.load_state(state)
    assert (joiner.count, joiner.recomputed - 2) == (40, 80)
    assert [seen.id for seen in joiner.newest(2)] == ["i39", "i40"]
    assert len(joiner.newest(100)) == KEPT


def test_what_is_slow_is_said_while_it_is():
    history = History()
    history.take(notice("task_degraded", 1.0, step=5, times=1.3))
    history.take(notice("straggler", 1.0, worker="n1-abc/0#1", rank=1, node="n1", times=1.5))
    other = History()
    other.load_state(history.state())
    assert other.conditions == {
        "degraded": "steps take 1.3 times as long as usual",
        "n1-abc/0#1": "straggler: rank 1 on n1, whose micro-batches take 1.5 times as long as its peers'",
    }
    history.take(notice("task_normal", 2.0, step=6))
    history.take(notice("straggler_over", 2.0, worker="n1-abc/0#1"))
    assert history.conditions == {}


@pytest.mark.parametrize(("seconds", "words"), [(0.0004, "0.4 ms"), (0.116, "116 ms"), (4.36, "4.4 s")])
def test_durations_in_words(seconds: float, words: str):
    assert in_words(seconds) == words


def test_the_picture_shows_all_of_it():
    history = History()
    failure(history, 1)
    view = TaskView(
        world=1,
        declared=2,
        epoch=3,
        step=7,
        total=50,
        phase="validation",
        phase_seconds={"compute": 0.18, "reduce": 0.02},
        steps_per_second=4.5,
        incidents=history.count,
        recomputed=history.recomputed,
        conditions=["rank 1 is slow"],
        newest=history.newest(5),
    )
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(picture(view))
    shown = console.export_text()
    for part in (
        "world 1 of 2",
        "epoch 3",
        "step 7 of 50",
        "validation",
        "4.50 steps/s",
        "rank 1 is slow",
        "compute 180 ms",
    ):
        assert part in shown
    for part in (
        "1 incidents, 2 micro-batches computed again",
        "signal",
        "n1",
        "1.0 ms",
        "240 ms",
        "4.0 s",
        "restored",
    ):
        assert part in shown
