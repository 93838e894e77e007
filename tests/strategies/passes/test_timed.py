"""Validation by the clock is decided for all ranks alike."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from unicron_lightning.strategies.schedule import TimedValidation


@pytest.mark.parametrize("answer", [False, True])
def test_the_decision_counts_whatever_the_own_clock_says(answer: bool) -> None:
    asked: list[bool] = []
    trainer: Any = SimpleNamespace(_val_check_time_interval=1e6 if answer else 0.0)
    timed = TimedValidation(trainer, lambda due: asked.append(due) or answer)  # type: ignore[func-returns-value]
    timed.stepped()
    assert asked == [not answer]
    assert trainer._last_val_time == (-math.inf if answer else math.inf)


def test_nothing_is_exchanged_without_a_duration() -> None:
    trainer: Any = SimpleNamespace(_val_check_time_interval=None)
    TimedValidation(trainer, lambda due: pytest.fail("asked")).stepped()
    assert not hasattr(trainer, "_last_val_time")
