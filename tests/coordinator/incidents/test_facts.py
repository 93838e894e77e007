"""Facts: their entries in the log, and which failures they report."""

from __future__ import annotations

import json

import msgspec
import pytest

from unicron_lightning.coordinator.incidents.facts import (
    PHASES,
    AgentLoss,
    Bill,
    BrokenConnection,
    EpochPublished,
    EpochSettled,
    ErrorFact,
    Fact,
    FirstStep,
    IncidentClosed,
    LifeBegun,
    PhaseCost,
    SlotGrant,
    TaskEnd,
    WorkerDeath,
    cause_of,
    explains,
    is_failure,
    occurred_at,
    read_fact,
)

GRANT = SlotGrant(agent="a", node="n", round=1, group_rank=0, group_world=1)
LOSS = AgentLoss(agent="a", node="n", away_since=5.0, silent=None)
ERROR = ErrorFact(step=3, kind="cuda_error", severity="SEV2", cause="c", happened_at=4.0, received_at=6.0, details={})


def death(cause: str, meaning: str = "") -> WorkerDeath:
    return WorkerDeath(worker="a/0#1", cause=cause, code=1, died_at=2.0, received_at=3.0, meaning=meaning)


def test_the_log_has_all_fields_but_empty_optional_ones() -> None:
    plain = {"worker": "a/0#1", "cause": "exit", "code": 1, "died_at": 2.0, "received_at": 3.0}
    assert death("exit").entry == plain
    assert death("exit", "out of memory").entry == {**plain, "meaning": "out of memory"}
    assert list(ERROR.entry)[-3:] == ["happened_at", "received_at", "details"]
    assert ERROR.entry["node"] is None


@pytest.mark.parametrize(
    ("fact", "fails", "at", "cause"),
    [
        (death("signal"), True, 2.0, "signal"),
        (death("signal", "killed by the kernel"), True, 2.0, "killed by the kernel"),
        (death("sibling"), False, 2.0, "sibling"),
        (death("node lost"), False, 2.0, "node lost"),
        (LOSS, True, 5.0, "node lost"),
        (ERROR, False, 4.0, "cuda_error: c"),
        (GRANT, False, None, None),
    ],
)
def test_what_facts_say_about_failures(fact: Fact, fails: bool, at: float | None, cause: str | None) -> None:
    assert (is_failure(fact), occurred_at(fact), cause_of(fact)) == (fails, at, cause)


def test_each_fact_has_a_name_of_its_own() -> None:
    names = [kind.event for kind in Fact.__subclasses__()]
    assert len(set(names)) == len(names)


BILL = Bill(
    cause="exit",
    failures=1,
    fault_at=1.0,
    known_at=2.0,
    stepped_at=None,
    slots_before=2,
    workers_before=4,
    weight=1.5,
    flops_per_step=None,
    phases={phase: PhaseCost(seconds=1.5, worker_seconds=2.5, waf_seconds=None) for phase in PHASES},
)
"""An open bill."""


@pytest.mark.parametrize(
    "fact",
    [
        death("signal", "killed by the kernel"),
        LOSS,
        ERROR,
        GRANT,
        BrokenConnection(worker="a/0#1", epoch=3, error="reset by peer"),
        EpochPublished(number=2, kind="fail", hold=False, members=["a/0#1"]),
        EpochSettled(number=2, kind="fail"),
        LifeBegun(life=2, path=None, step=None),
        TaskEnd(succeeded=True, reason="done", life=1, epoch=3),
        IncidentClosed(outcome="restored", closed_at=9.0, bill=BILL),
    ],
)
def test_a_fact_is_read_back_from_its_entry_in_the_log(fact: Fact) -> None:
    assert read_fact(fact.event, json.loads(json.dumps(fact.entry)), 0.0) == fact


def test_a_report_of_a_first_step_is_read_from_the_log_and_from_a_notice() -> None:
    report = {"epoch": 3, "step": 8, "world": 2, "recomputed": [1, 4], "more": "x"}
    step = FirstStep(
        name="recovered", transition="shrink_in_place", epoch=3, at=5.0, step=8, world=2, recomputed=[1, 4]
    )
    assert read_fact("worker.recovered", report, 5.0) == step
    assert read_fact("worker.recovered", {**report, "at": 5.0, "worker": "a/0#1"}, 6.0) == step
    assert read_fact("worker.entered_epoch", report, 5.0) is None


@pytest.mark.parametrize("name", ["worker_died", "agent_lost", "incident_closed", "plan_made"])
def test_other_events_and_incomplete_ones_are_no_facts(name: str) -> None:
    assert read_fact(name, {"agent": "a"}, 0.0) is None


def test_what_explains_a_broken_connection() -> None:
    facts = (death("exit"), death("sibling"), LOSS, ERROR, msgspec.structs.replace(ERROR, ends=True), GRANT, None)
    assert [explains(fact) for fact in facts] == [True, False, True, False, True, False, False]
