"""Facts: their entries in the log, and what they say about failures."""

from __future__ import annotations

import pytest

from unicron_lightning.coordinator.incidents.facts import (
    AgentLoss,
    ErrorFact,
    Fact,
    SlotGrant,
    WorkerDeath,
    cause_of,
    is_failure,
    occurred_at,
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
