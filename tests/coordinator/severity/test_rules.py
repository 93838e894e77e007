"""The severity workflow's table: every row is reached, has its stated effect, and is in the guide."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path

import pytest
from coordinator.severity.story import WAYS

from unicron_lightning.coordinator.severity.record import SEVERITY
from unicron_lightning.coordinator.severity.rules import RULES
from unicron_lightning.detection.health import UNKNOWN, builtin


def test_there_is_a_way_into_every_row() -> None:
    assert set(WAYS) == {rule.name for rule in RULES}
    assert len({rule.name for rule in RULES}) == len(RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_row_is_reached_and_does_what_it_says(rule) -> None:
    decisions = [decision for decision in WAYS[rule.name]().all if decision.rule == rule.name]
    assert decisions
    assert {decision.action for decision in decisions} == {rule.action}


def test_the_guide_shows_every_kind_with_its_severity_and_those_seen_today_are_the_wired_ones() -> None:
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in _table("| kind |")]
    assert [(kind.strip("`"), severity) for kind, _, severity, _ in rows] == [*SEVERITY.items()]
    seen = {kind.strip("`") for kind, _, _, evidence in rows if evidence}
    by_message = {pattern.kind for pattern in builtin()} | {UNKNOWN}
    assert seen == by_message | {
        "config_error",
        "programs_differ",
        "silent_data_corruption",
        "gradients_differ",
        *("lost_connection", "exited_abnormally", "link_flapping", "task_hang", "node_degraded", "link_degraded"),
        *("silent", "recovery_stuck", "keeps_failing", "parameters_differ", "unnamed_software_error"),
    }


def test_the_guide_shows_the_rules() -> None:
    assert _table("| rule |") == [f"| {r.name} | {r.on} | {r.when} | {r.action}: {r.then} |" for r in RULES]


def _table(head: str) -> list[str]:
    """Return the rows of the guide's table that begins so."""
    guide = (Path(__file__).parents[3] / "docs" / "detection.md").read_text(encoding="utf-8")
    lines = guide.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(head)) + 2
    return [*takewhile(lambda line: line.startswith("|"), lines[start:])]
