"""The checker of histories finds each kind of violation that is planted in a good one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from histories import Order, violations


def logged(*events: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"seq": number, "at": float(number), "name": name, "task": "t", "incident": None, "fields": fields}
        for number, (name, fields) in enumerate(events, 1)
    ]


def epoch(number: int, *members: str) -> tuple[str, dict[str, Any]]:
    return "epoch_published", {"number": number, "members": list(members)}


def grant(agent: str, rank: int) -> tuple[str, dict[str, Any]]:
    return "slot_granted", {"agent": agent, "group_rank": rank, "group_world": 2}


GOOD = [grant("a", 0), grant("b", 1), epoch(1, "a", "b"), ("agent_lost", {"agent": "b"}), epoch(2, "a"), grant("c", 1)]
STEPS = [{"pid": 1, "epoch": 1, "world": 2}, {"pid": 2, "epoch": 1, "world": 2}, {"pid": 1, "epoch": 2, "world": 1}]
ORDERS = [Order("j", confirmed=True), Order("k", confirmed=False)]


def test_a_good_history_has_none() -> None:
    assert violations(logged(*GOOD), ORDERS, ["j"], STEPS) == []


@pytest.mark.parametrize(
    ("planted", "words"),
    [
        ({"events": logged(*GOOD, epoch(2, "a", "c"))}, "two lists of members"),
        ({"events": logged(*GOOD, epoch(1, "a", "b"))}, "epoch 1 of t follows epoch 2"),
        ({"events": logged(*GOOD, grant("d", 0))}, "['a', 'c', 'd'] have places of t, which has 2"),
        ({"events": [*logged(*GOOD), *logged(epoch(3, "a"))]}, "event 1 follows event 6"),
        ({"known": ["k"]}, "order j was confirmed and is lost"),
        ({"steps": [*STEPS, {"pid": 3, "epoch": 2, "world": 2}]}, "worlds of 1 and 2"),
        ({"steps": [*STEPS, {"pid": 1, "epoch": 1, "world": 2}]}, "returned from epoch 2 to 1"),
    ],
)
def test_a_planted_violation_is_found(planted: dict[str, Any], words: str) -> None:
    good: dict[str, Any] = {"events": logged(*GOOD), "orders": ORDERS, "known": ["j"], "steps": STEPS}
    (found,) = violations(**{**good, **planted})
    assert words in found
