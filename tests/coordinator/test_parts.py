"""The machine's parts: every message and every timer has its rules."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import unicron_lightning.coordinator
from unicron_lightning import wire
from unicron_lightning.coordinator.parts import PARTS

OF_THE_MACHINE = {"idle", "node_lost", "plan"}
"""Timers that belong to no task."""


def test_each_message_of_an_agent_has_a_rule() -> None:
    handled = {kind for part in PARTS for kind, _ in part.receivers}
    assert handled == {*get_args(wire.FromAgent)} - {wire.Register, wire.Beat}


def test_each_timer_that_is_set_has_one_rule() -> None:
    declared = [kind for part in PARTS for kind in (*part.timers, *part.agent_timers)]
    assert len(set(declared)) == len(declared)
    sources = Path(unicron_lightning.coordinator.__file__).parent.rglob("*.py")
    started = {kind for source in sources for kind in re.findall(r'turn\.timer\(\s*"(\w+)"', source.read_text())}
    assert started == {*declared, *OF_THE_MACHINE}


def test_the_severity_workflow_sees_a_task_before_the_record_of_its_workers_changes() -> None:
    both = [part for part in PARTS if any(kind is wire.WorkerDied for kind, _ in part.receivers)]
    assert [part.review is not None for part in both] == [True, False]
