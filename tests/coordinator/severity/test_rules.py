"""The severity workflow's table: every row is reached, has its stated effect, and is in the guide."""

from __future__ import annotations

from pathlib import Path

import pytest
from coordinator.severity.story import WAYS

from unicron_lightning.coordinator.severity.errors import KINDS, SEVERITY
from unicron_lightning.coordinator.severity.rules import RULES
from unicron_lightning.detection.patterns import UNKNOWN, builtin


def test_there_is_a_way_into_every_row() -> None:
    assert set(WAYS) == {rule.name for rule in RULES}
    assert len({rule.name for rule in RULES}) == len(RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_row_is_reached_and_does_what_it_says(rule) -> None:
    decisions = [decision for decision in WAYS[rule.name]().all if decision.rule == rule.name]
    assert decisions
    assert {decision.action for decision in decisions} == {rule.action}


def test_every_kind_has_one_severity_and_those_seen_today_are_the_wired_ones() -> None:
    assert len(SEVERITY) == len(KINDS)
    seen = {kind.name for kind in KINDS if kind.seen}
    by_message = {pattern.kind for pattern in builtin()} | {UNKNOWN}
    assert seen == by_message | {
        "config_error",
        "programs_differ",
        *("lost_connection", "exited_abnormally", "link_flapping", "task_hang", "node_degraded", "link_degraded"),
        *("silent", "recovery_stuck", "keeps_failing", "parameters_differ"),
    }


def test_the_guide_shows_these_tables() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "detection.md").read_text(encoding="utf-8")
    lines = guide.splitlines()
    kinds = [f"| `{k.name}` | {k.method or 'added to the paper'} | {k.severity} | {k.seen} |" for k in KINDS]
    rules = [f"| {r.name} | {r.on} | {r.when} | {r.action}: {r.then} |" for r in RULES]
    for head, rows in (("| kind |", kinds), ("| rule |", rules)):
        start = next(number for number, line in enumerate(lines) if line.startswith(head)) + 2
        assert lines[start : start + len(rows)] == rows
        assert not lines[start + len(rows)].startswith("|"), "a row too many"
